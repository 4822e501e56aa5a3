"""Scheduling dashboard: queue times, decisions and the accuracy of estimates."""

from observability.panels import Dashboard, Panel, Query, line
from observability.queries import gauge, mean, quantile, rate

WAITS = 'sum by (le) (increase(ewsjf_queue_wait_seconds_bucket{model=~"$model"}[$interval]))'
PREDICTION_ERROR = "ewsjf_queue_wait_prediction_error"
QUEUE_WAIT = "ewsjf_length_queue_wait_seconds"
ESTIMATES = "ewsjf_queue_estimates_total"
FIRST = ', estimate="first"'
INSIDE = f'{FIRST}, verdict="inside"'

BLOCKED_HEADS = line(
    "Wait causes of queue heads",
    "Heads of sub-queues by home pool and wait cause.",
    "short",
    (gauge("ewsjf_blocked_heads", "pool, cause"), "{{pool}}: {{cause}}"),
    stacked=True,
)
"""Shared with the saturation dashboard."""

SCHEDULING = Dashboard(
    name="scheduling",
    title="scheduling",
    text="Queue times by length queue, wait causes, and the accuracy of estimates.",
    sections=(
        (
            "Queue times",
            (
                Panel(
                    "Queue time by length queue",
                    "Mean queue time of dispatched requests. Short lengths should be the pale rows.",
                    "s",
                    (Query(mean(QUEUE_WAIT, "length_queue"), "{{length_queue}}"),),
                    kind="heatmap",
                ),
                Panel(
                    "Distribution of queue times",
                    "Queue time until dispatch, of all requests.",
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
                    "Queued requests by length queue",
                    "Requests that are queued now.",
                    "short",
                    (gauge("ewsjf_length_queue_requests_waiting", "length_queue", "sum"), "{{length_queue}}"),
                    stacked=True,
                ),
                line(
                    "Oldest head by length queue",
                    "Queue time so far of the oldest head.",
                    "s",
                    (gauge("ewsjf_length_queue_oldest_wait_seconds", "length_queue"), "{{length_queue}}"),
                ),
                BLOCKED_HEADS,
                line(
                    "Queue time by cause",
                    "Seconds of queue time per second, of requests that left the queue (see `explain`).",
                    "short",
                    (rate("ewsjf_queue_wait_cause_seconds_total", "cause"), "{{cause}}"),
                    stacked=True,
                ),
                line(
                    "Queue time, P99",
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
                    "Dispatches and spills",
                    "Requests dispatched to each pool, and those with another home pool.",
                    "reqps",
                    (rate("ewsjf_dispatches_total", "pool"), "{{pool}}"),
                    (rate("ewsjf_spills_total", "pool"), "{{pool}} spilled"),
                ),
                line(
                    "Decision time",
                    "Time that the scheduler core takes for one event.",
                    "s",
                    (quantile(0.5, "ewsjf_overhead_seconds", "", ',stage="decide"'), "P50"),
                    (quantile(0.99, "ewsjf_overhead_seconds", "", ',stage="decide"'), "P99"),
                ),
                line(
                    "Boundary of the first pool",
                    "Token budget up to which the first pool is a request's home pool (b_short_tokens).",
                    "short",
                    (gauge("ewsjf_b_short_tokens", "model"), "{{model}}"),
                ),
                line(
                    "Length queues",
                    "Number of learned length queues; 0 while the policy uses its initial ones.",
                    "short",
                    (gauge("ewsjf_length_queues", "model"), "{{model}}"),
                ),
            ),
        ),
        (
            "Accuracy of estimates",
            (
                line(
                    "Estimated over actual tokens",
                    "1 is exact; above 1, the estimate was too high.",
                    "short",
                    (quantile(0.1, "ewsjf_estimate_ratio", "kind"), "P10 {{kind}}"),
                    (quantile(0.5, "ewsjf_estimate_ratio", "kind"), "P50 {{kind}}"),
                    (quantile(0.9, "ewsjf_estimate_ratio", "kind"), "P90 {{kind}}"),
                ),
                line(
                    "Misroutes",
                    "Requests whose actual tokens belong to another pool.",
                    "reqps",
                    (rate("ewsjf_misroutes_total", "pool, actual"), "{{actual}} in {{pool}}"),
                ),
                line(
                    "Error of predicted queue times",
                    "Predicted minus actual queue time: mean, and mean of the absolute value.",
                    "s",
                    (gauge(f"{PREDICTION_ERROR}_mean_seconds", "model"), "{{model}} mean"),
                    (
                        gauge(f"{PREDICTION_ERROR}_absolute_mean_seconds", "model"),
                        "{{model}} absolute",
                    ),
                ),
                line(
                    "Error of predicted queue times, quantiles",
                    "Of dispatched requests that had a prediction.",
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
