"""What is short, and what fails."""

from observability.panels import Dashboard, line
from observability.queries import GATEWAY, gauge, quantile, rate
from observability.scheduling import BLOCKED_HEADS

SATURATION = Dashboard(
    name="saturation",
    title="saturation and failure",
    text="What is short and what fails: read it from the top when an alert has fired.",
    sections=(
        (
            "Capacity",
            (
                line(
                    "Saturation of pools",
                    "Share of working replicas that take nothing more; 1 for minutes means too few.",
                    "percentunit",
                    (gauge("ewsjf_pool_saturation_ratio", "model, pool"), "{{model}} {{pool}}"),
                    at_most=1,
                ),
                BLOCKED_HEADS,
                line(
                    "Batches and KV cache",
                    "Requests over places in batches, and KV cache reserved; the higher one is the limit.",
                    "percentunit",
                    (gauge("ewsjf_pool_capacity_ratio", "model, pool"), "{{model}} {{pool}} batch"),
                    (gauge("ewsjf_pool_kv_reserved_ratio", "model, pool"), "{{model}} {{pool}} KV cache"),
                ),
                line(
                    "Oldest wait by class",
                    "How long the oldest head has waited.",
                    "s",
                    (gauge("ewsjf_length_queue_oldest_wait_seconds", "model, class"), "{{model}} {{class}}"),
                ),
                line(
                    "Drain rate",
                    "Estimated tokens dispatched per second while requests waited; Retry-After rests on it.",
                    "short",
                    (gauge("ewsjf_queue_drain_tokens_per_second", "model"), "{{model}}"),
                ),
                line(
                    "Expected returns",
                    "Rejected requests whose return is expected.",
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
                    "What kept requests from the targets of their class.",
                    "reqps",
                    (rate(f"{GATEWAY}slo_violations_total", "kind"), "{{kind}}"),
                    stacked=True,
                ),
                line(
                    "Requests put back",
                    "Dispatches that failed before their first byte, and were tried again.",
                    "reqps",
                    (rate("ewsjf_put_backs_total", "model, failure"), "{{model}} {{failure}}"),
                ),
                line(
                    "Stale replicas",
                    "Replicas without a fresh report; they get no requests.",
                    "short",
                    (gauge("ewsjf_replicas_stale", "model"), "{{model}}"),
                    (rate("ewsjf_stale_reports_total", "model"), "{{model}} new per second"),
                ),
                line(
                    "Preemptions in engines",
                    "Sequences whose KV cache was taken away, of pages of engines.",
                    "ops",
                    (
                        "sum by (model, pool) (rate(vllm:num_preemptions_total[$interval]))",
                        "{{model}} {{pool}}",
                    ),
                ),
                line(
                    "Faults and restarts",
                    "Schedulers that were replaced, and faults of the project itself.",
                    "short",
                    (gauge("ewsjf_scheduler_incarnation", "model"), "{{model}} incarnation"),
                    (gauge("ewsjf_scheduler_errors_total", "model"), "{{model}} faults"),
                    (gauge("ewsjf_scaling_failures_total", "model"), "{{model}} scaling failures"),
                ),
            ),
        ),
        (
            "Processes",
            (
                line(
                    "Added by the application, P99",
                    "Reading a request, asking the scheduler apart from the queue, and deciding.",
                    "s",
                    (quantile(0.99, "ewsjf_overhead_seconds", "stage"), "{{stage}}"),
                ),
                line(
                    "Processor time",
                    "Of one core; a process near 1 is a limit.",
                    "percentunit",
                    (
                        "sum by (process, gateway, model) (rate(ewsjf_process_cpu_seconds_total[$interval]))",
                        "{{process}} {{gateway}}{{model}}",
                    ),
                ),
                line(
                    "Memory",
                    "That processes hold.",
                    "bytes",
                    (
                        "sum by (process, gateway, model) (ewsjf_process_resident_memory_bytes)",
                        "{{process}} {{gateway}}{{model}}",
                    ),
                ),
                line(
                    "Bodies held",
                    "Request bodies in memory; past max_held_body_bytes, requests are rejected.",
                    "bytes",
                    ("sum by (gateway) (ewsjf_gateway_held_body_bytes)", "{{gateway}}"),
                ),
                line(
                    "Gateways",
                    "Gateways that their scheduler hears.",
                    "short",
                    (gauge("ewsjf_gateways_connected", "model"), "{{model}}"),
                ),
                line(
                    "Connections to replicas",
                    "Opened, and requests repeated because a kept one was closed.",
                    "ops",
                    ("sum(rate(ewsjf_gateway_upstream_connects_total[$interval]))", "opened"),
                    ("sum(rate(ewsjf_gateway_upstream_stale_retries_total[$interval]))", "repeated"),
                ),
            ),
        ),
    ),
)
