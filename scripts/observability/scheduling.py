"""Which request goes when, and how well that was foreseen."""

from observability.panels import Dashboard, Panel, Query, line
from observability.queries import gauge, mean, quantile, rate

WAITS = 'sum by (le) (increase(ewsjf_queue_wait_seconds_bucket{model=~"$model"}[$interval]))'
PREDICTION_ERROR = "ewsjf_queue_wait_prediction_error"
QUEUE_WAIT = "ewsjf_length_queue_wait_seconds"
ESTIMATES = "ewsjf_queue_estimates_total"
FIRST = ', estimate="first"'
INSIDE = f'{FIRST}, verdict="inside"'

BLOCKED_HEADS = line(
    "What heads wait for",
    "Heads of sub-queues by their home pool and what they wait for.",
    "short",
    (gauge("ewsjf_blocked_heads", "pool, cause"), "{{pool}}: {{cause}}"),
    stacked=True,
)
"""Tells of saturation, too."""

SCHEDULING = Dashboard(
    name="scheduling",
    title="scheduling",
    text="Who waits in which length queue, for how long and why, and how good estimates are.",
    sections=(
        (
            "Waits",
            (
                Panel(
                    "Wait by length queue",
                    "Mean wait of what left each length queue; short lengths ought to be the pale ones.",
                    "s",
                    (Query(mean(QUEUE_WAIT, "length_queue"), "{{length_queue}}"),),
                    kind="heatmap",
                ),
                Panel(
                    "Distribution of waits",
                    "Time in the queue until dispatch, of all requests.",
                    "short",
                    (
                        Query(
                            WAITS,
                            "{{le}}",
                        ),
                    ),
                    kind="heatmap",
                    rows="buckets",
                ),
                line(
                    "Requests by length queue",
                    "Requests that wait now.",
                    "short",
                    (gauge("ewsjf_length_queue_requests_waiting", "length_queue", "sum"), "{{length_queue}}"),
                    stacked=True,
                ),
                line(
                    "Oldest head by length queue",
                    "How long the oldest head has waited.",
                    "s",
                    (gauge("ewsjf_length_queue_oldest_wait_seconds", "length_queue"), "{{length_queue}}"),
                ),
                BLOCKED_HEADS,
                line(
                    "What requests have waited for",
                    "Seconds of waiting that ended in each second, by cause (see `explain`).",
                    "short",
                    (rate("ewsjf_queue_wait_cause_seconds_total", "cause"), "{{cause}}"),
                    stacked=True,
                ),
                line(
                    "Wait in the queue, P99",
                    "By pool and class.",
                    "s",
                    (quantile(0.99, "ewsjf_queue_wait_seconds", "pool, class"), "{{pool}} {{class}}"),
                ),
            ),
        ),
        (
            "Decisions",
            (
                line(
                    "Grants and spills",
                    "Requests sent to each pool, and those that were at home in another.",
                    "reqps",
                    (rate("ewsjf_dispatches_total", "pool"), "{{pool}}"),
                    (rate("ewsjf_spills_total", "pool"), "{{pool}} spilled"),
                ),
                line(
                    "Time of a decision",
                    "That the scheduler's core takes for an event.",
                    "s",
                    (quantile(0.5, "ewsjf_overhead_seconds", "", ',stage="decide"'), "P50"),
                    (quantile(0.99, "ewsjf_overhead_seconds", "", ',stage="decide"'), "P99"),
                ),
                line(
                    "Border of the pools",
                    "Token budget up to which a request is at home in the first pool.",
                    "short",
                    (gauge("ewsjf_b_short_tokens", "model"), "{{model}}"),
                ),
                line(
                    "Length queues",
                    "That were learned; 0 while the policy has those that it began with.",
                    "short",
                    (gauge("ewsjf_length_queues", "model"), "{{model}}"),
                ),
            ),
        ),
        (
            "Foresight",
            (
                line(
                    "Estimated over actual tokens",
                    "1 is right; above 1 was estimated too high.",
                    "short",
                    (quantile(0.1, "ewsjf_estimate_ratio", "kind"), "P10 {{kind}}"),
                    (quantile(0.5, "ewsjf_estimate_ratio", "kind"), "P50 {{kind}}"),
                    (quantile(0.9, "ewsjf_estimate_ratio", "kind"), "P90 {{kind}}"),
                ),
                line(
                    "Wrong routes",
                    "Requests whose actual tokens belonged into another pool.",
                    "reqps",
                    (rate("ewsjf_misroutes_total", "pool, actual"), "{{actual}} in {{pool}}"),
                ),
                line(
                    "Error of predicted waits",
                    "Predicted minus actual wait, with its sign and by size.",
                    "s",
                    (gauge(f"{PREDICTION_ERROR}_mean_seconds", "model"), "{{model}} mean"),
                    (
                        gauge(f"{PREDICTION_ERROR}_absolute_mean_seconds", "model"),
                        "{{model}} size",
                    ),
                ),
                line(
                    "Error of predicted waits, quantiles",
                    "Of requests that had a prediction.",
                    "s",
                    (quantile(0.1, "ewsjf_queue_wait_prediction_error_seconds"), "P10"),
                    (quantile(0.9, "ewsjf_queue_wait_prediction_error_seconds"), "P90"),
                ),
                line(
                    "Starts within the predicted interval",
                    "Of requests whose clients subscribe to queue updates; the target is 80 %.",
                    "percentunit",
                    (f"{rate(ESTIMATES, 'class', INSIDE)} / {rate(ESTIMATES, 'class', FIRST)}", "{{class}}"),
                ),
            ),
        ),
    ),
)
