"""Dashboard of saturation and failures."""

from observability.panels import Dashboard, line
from observability.queries import GATEWAY, gauge, quantile, rate
from observability.scheduling import BLOCKED_HEADS

SATURATION = Dashboard(
    name="saturation",
    title="saturation and failure",
    text="Capacity, failures and processes. Read it from the top when an alert has fired.",
    sections=(
        (
            "Capacity",
            (
                line(
                    "Saturation of pools",
                    "Share of replicas that are saturated. 1 for minutes: the pool needs replicas.",
                    "percentunit",
                    (gauge("ewsjf_pool_saturation_ratio", "model, pool"), "{{model}} {{pool}}"),
                    at_most=1,
                ),
                BLOCKED_HEADS,
                line(
                    "Batches and KV cache",
                    "In-flight requests over concurrency, and reserved KV cache; the higher one limits.",
                    "percentunit",
                    (gauge("ewsjf_pool_capacity_ratio", "model, pool"), "{{model}} {{pool}} batch"),
                    (gauge("ewsjf_pool_kv_reserved_ratio", "model, pool"), "{{model}} {{pool}} KV cache"),
                ),
                line(
                    "Oldest queue time by class",
                    "Queue time so far of the oldest head.",
                    "s",
                    (gauge("ewsjf_length_queue_oldest_wait_seconds", "model, class"), "{{model}} {{class}}"),
                ),
                line(
                    "Drain rate",
                    "Estimated tokens dispatched per second while requests waited; the basis of Retry-After.",
                    "short",
                    (gauge("ewsjf_queue_drain_tokens_per_second", "model"), "{{model}}"),
                ),
                line(
                    "Expected retries",
                    "Rejected requests whose retry is expected.",
                    "short",
                    (gauge("ewsjf_retry_reservations", "model"), "{{model}}"),
                ),
            ),
        ),
        (
            "Failures",
            (
                line(
                    "Requests not served",
                    "Rejected, expired or failed, by outcome.",
                    "reqps",
                    (
                        rate(f"{GATEWAY}requests_total", "outcome", ',outcome!~"completed|cancelled"'),
                        "{{outcome}}",
                    ),
                    stacked=True,
                ),
                line(
                    "Targets missed",
                    "Requests that missed the latency targets of their class, by kind.",
                    "reqps",
                    (rate(f"{GATEWAY}slo_violations_total", "kind"), "{{kind}}"),
                    stacked=True,
                ),
                line(
                    "Requests put back",
                    "Dispatches that failed before their first byte, by failure.",
                    "reqps",
                    (rate("ewsjf_put_backs_total", "model, failure"), "{{model}} {{failure}}"),
                ),
                line(
                    "Stale replicas",
                    "Replicas whose load report is too old; they receive no requests.",
                    "short",
                    (gauge("ewsjf_replicas_stale", "model"), "{{model}}"),
                    (rate("ewsjf_stale_reports_total", "model"), "{{model}} new per second"),
                ),
                line(
                    "Remote endpoints",
                    "Endpoints of remote pools that can be used (up) and that cannot (down).",
                    "short",
                    (gauge("ewsjf_endpoints", "model, pool, state"), "{{model}} {{pool}} {{state}}"),
                ),
                line(
                    "Preemptions in engines",
                    "Sequences whose KV cache was evicted, from the engines' metrics.",
                    "ops",
                    (
                        "sum by (model, pool) (rate(vllm:num_preemptions_total[$interval]))",
                        "{{model}} {{pool}}",
                    ),
                ),
                line(
                    "Failures and restarts",
                    "Replacements of the scheduler, its internal errors, and failures of autoscaling.",
                    "short",
                    (gauge("ewsjf_scheduler_incarnation", "model"), "{{model}} incarnation"),
                    (gauge("ewsjf_scheduler_errors_total", "model"), "{{model}} errors"),
                    (gauge("ewsjf_scaling_failures_total", "model"), "{{model}} scaling failures"),
                ),
            ),
        ),
        (
            "Processes",
            (
                line(
                    "Overhead of the application, P99",
                    "Stages: parse, schedule (round trip to the scheduler without queue time), decide.",
                    "s",
                    (quantile(0.99, "ewsjf_overhead_seconds", "stage"), "{{stage}}"),
                ),
                line(
                    "CPU usage",
                    "100 % is one core. A process near one core is a bottleneck.",
                    "percentunit",
                    (
                        "sum by (process, gateway, model) (rate(ewsjf_process_cpu_seconds_total[$interval]))",
                        "{{process}} {{gateway}}{{model}}",
                    ),
                ),
                line(
                    "Memory",
                    "Resident memory by process.",
                    "bytes",
                    (
                        "sum by (process, gateway, model) (ewsjf_process_resident_memory_bytes)",
                        "{{process}} {{gateway}}{{model}}",
                    ),
                ),
                line(
                    "Request bodies in memory",
                    "Above max_held_body_bytes, requests are rejected.",
                    "bytes",
                    ("sum by (gateway) (ewsjf_gateway_held_body_bytes)", "{{gateway}}"),
                ),
                line(
                    "Gateways",
                    "Gateways connected to their scheduler.",
                    "short",
                    (gauge("ewsjf_gateways_connected", "model"), "{{model}}"),
                ),
                line(
                    "Connections to replicas",
                    "Connections opened, and requests retried because the reused connection was closed.",
                    "ops",
                    ("sum(rate(ewsjf_gateway_upstream_connects_total[$interval]))", "opened"),
                    ("sum(rate(ewsjf_gateway_upstream_stale_retries_total[$interval]))", "retried"),
                ),
            ),
        ),
    ),
)
