"""Dashboard of pools and their engines."""

from observability.panels import Dashboard, line
from observability.queries import GATEWAY, gauge, quantile, rate

HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


def _engines(name: str, how: str = "sum") -> str:
    return f"{how} by (model, pool, replica) ({name})"


POOLS = Dashboard(
    name="pools",
    title="pools and engines",
    text="Size, load and speed of each pool, and the metrics of its engines.",
    sections=(
        (
            "Size",
            (
                line(
                    "Replicas by state",
                    "Only open replicas receive requests.",
                    "short",
                    (gauge("ewsjf_pool_replicas", "pool, state"), "{{pool}} {{state}}"),
                    stacked=True,
                ),
                line(
                    "Desired replicas",
                    "Result of autoscaling, and the offered load in engines.",
                    "short",
                    (gauge("ewsjf_desired_replicas", "model, pool"), "{{model}} {{pool}} desired"),
                    (gauge("ewsjf_pool_load_engines", "model, pool"), "{{model}} {{pool}} load"),
                ),
                line(
                    "Backlog",
                    "Queued work, in seconds of one engine.",
                    "s",
                    (gauge("ewsjf_pool_backlog_seconds", "model, pool"), "{{model}} {{pool}}"),
                ),
                line(
                    "Autoscaling decisions",
                    "Up and down in turn: raise downscale_delay_s.",
                    "ops",
                    (rate("ewsjf_scaling_decisions_total", "pool, direction"), "{{pool}} {{direction}}"),
                ),
            ),
        ),
        (
            "Load",
            (
                line(
                    "Requests in flight",
                    "By replica.",
                    "short",
                    (gauge("ewsjf_requests_in_flight", "pool, replica"), "{{pool}} {{replica}}"),
                ),
                line(
                    "Engines' own queues",
                    "As last reported. Short by design, because requests wait in the scheduler.",
                    "short",
                    (gauge("ewsjf_replica_waiting", "pool, replica"), "{{pool}} {{replica}}"),
                ),
                line(
                    "KV cache in use",
                    "By replica, as last reported.",
                    "percentunit",
                    (gauge("ewsjf_replica_kv_usage_ratio", "pool, replica"), "{{pool}} {{replica}}"),
                    at_most=1,
                ),
                line(
                    "Dispatches by pool",
                    "Requests dispatched to each pool.",
                    "reqps",
                    (rate("ewsjf_dispatches_total", "model, pool"), "{{model}} {{pool}}"),
                ),
            ),
        ),
        (
            "Speed",
            (
                line(
                    "Time to first token, P99",
                    "By pool.",
                    "s",
                    (quantile(0.99, f"{GATEWAY}time_to_first_token_seconds", "pool"), "{{pool}}"),
                ),
                line(
                    "Time per output token, P99",
                    "By pool.",
                    "s",
                    (quantile(0.99, f"{GATEWAY}time_per_output_token_seconds", "pool"), "{{pool}}"),
                ),
                line(
                    "Tokens per second",
                    "By pool and kind.",
                    "short",
                    (rate(f"{GATEWAY}tokens_total", "pool, kind"), "{{pool}} {{kind}}"),
                ),
            ),
        ),
        (
            "Engine metrics",
            (
                line(
                    "Running and waiting",
                    "Requests in each engine, from the engine's metrics.",
                    "short",
                    (_engines("vllm:num_requests_running"), "{{pool}} {{replica}} running"),
                    (_engines("vllm:num_requests_waiting"), "{{pool}} {{replica}} waiting"),
                ),
                line(
                    "Preemptions",
                    "Sequences whose KV cache was evicted.",
                    "ops",
                    (_engines("rate(vllm:num_preemptions_total[$interval])"), "{{pool}} {{replica}}"),
                ),
                line(
                    "Prefix cache hit rate",
                    "Share of prompt tokens found in the prefix cache.",
                    "percentunit",
                    (
                        f"{_engines(f'rate({HITS}[$interval])')} / {_engines(f'rate({QUERIES}[$interval])')}",
                        "{{pool}} {{replica}}",
                    ),
                    at_most=1,
                ),
            ),
        ),
    ),
)
