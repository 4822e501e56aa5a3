"""Overview dashboard: traffic, latencies and SLO attainment."""

from observability.panels import Dashboard, Panel, Query, line
from observability.queries import GATEWAY, attainment, gauge, quantile, rate

TTFT, TPOT = f"{GATEWAY}time_to_first_token_seconds", f"{GATEWAY}time_per_output_token_seconds"
ITL, E2E, WAIT = (
    f"{GATEWAY}inter_token_latency_seconds",
    f"{GATEWAY}e2e_seconds",
    f"{GATEWAY}queue_wait_seconds",
)
FAILED = 'outcome=~"failed|expired|rejected_queue_full|rejected_deadline_unmeetable|rejected_no_replica"'


def _stat(title: str, text: str, unit: str, expr: str) -> Panel:
    return Panel(title, text, unit, (Query(expr),), kind="stat", width=4)


def _by_class(title: str, text: str, histogram: str) -> Panel:
    quantiles = (
        (quantile(share, histogram, "class"), f"P{share * 100:g} {{{{class}}}}") for share in (0.5, 0.99)
    )
    return line(title, text, "s", *quantiles)


_ALL = 'sum(rate(ewsjf_gateway_requests_total{model=~"$model"}[$interval]))'
_NOT_SERVED = f'sum(rate(ewsjf_gateway_requests_total{{model=~"$model",{FAILED}}}[$interval]))'

OVERVIEW = Dashboard(
    name="overview",
    title="overview",
    text="Traffic, latencies, SLO attainment and queued requests.",
    sections=(
        (
            "Now",
            (
                _stat("Requests", "Concluded requests of all outcomes.", "reqps", _ALL),
                _stat(
                    "SLO attainment",
                    "Share of requests that met the latency targets of their class.",
                    "percentunit",
                    attainment("model").replace("sum by (model) ", "sum "),
                ),
                _stat(
                    "Not served",
                    "Share of requests that were rejected for lack of capacity, expired or failed.",
                    "percentunit",
                    f"{_NOT_SERVED} / {_ALL} or 0 * {_ALL}",
                ),
                _stat("TTFT, P99", "Time from arrival to the first byte.", "s", quantile(0.99, TTFT)),
                _stat(
                    "Queued",
                    "Queued requests.",
                    "short",
                    'sum(max by (model, class) (ewsjf_requests_waiting{model=~"$model"}))',
                ),
                _stat(
                    "In flight",
                    "Requests in flight on replicas.",
                    "short",
                    'sum(max by (model, replica) (ewsjf_requests_in_flight{model=~"$model"}))',
                ),
            ),
        ),
        (
            "Traffic",
            (
                line(
                    "Requests by outcome",
                    "Concluded requests. Rejections and failures show here first.",
                    "reqps",
                    (rate("ewsjf_gateway_requests_total", "outcome"), "{{outcome}}"),
                    stacked=True,
                ),
                line(
                    "Tokens per second",
                    "Prompt and output tokens, as counted by the engines.",
                    "short",
                    (rate("ewsjf_gateway_tokens_total", "model, kind"), "{{model}} {{kind}}"),
                ),
                line(
                    "SLO attainment by class",
                    "Share of requests that met the latency targets of their class.",
                    "percentunit",
                    (attainment("class"), "{{class}}"),
                    at_most=1,
                ),
                line(
                    "Queued requests",
                    "Queued requests by class.",
                    "short",
                    (gauge("ewsjf_requests_waiting", "model, class"), "{{model}} {{class}}"),
                    stacked=True,
                ),
            ),
        ),
        (
            "Latencies",
            (
                _by_class(
                    "Time to first token", "Time from arrival to the first byte of streamed answers.", TTFT
                ),
                _by_class(
                    "Queue time",
                    "Time from arrival to the last grant; part of the time to first token.",
                    WAIT,
                ),
                _by_class(
                    "Time per output token", "After the first token, mean of each streamed answer.", TPOT
                ),
                _by_class("Inter-token latency", "Gaps in streams; the tail shows stutter.", ITL),
                _by_class("End to end", "Time from arrival to completion, of completed requests.", E2E),
                line(
                    "Overhead of the application, P99",
                    "Stages: parse, schedule (round trip to the scheduler without queue time), decide.",
                    "s",
                    (quantile(0.99, "ewsjf_overhead_seconds", "stage"), "{{stage}}"),
                ),
            ),
        ),
        (
            "Targets and affinity",
            (
                line(
                    "Latency targets by result",
                    "Targets that requests stated, met, missed or refused on arrival.",
                    "reqps",
                    (rate("ewsjf_latency_targets_total", "target, result"), "{{target}} {{result}}"),
                    stacked=True,
                ),
                line(
                    "Longest gap of streams, P99",
                    "By cause: a prefill beside it, a full KV cache, or another one.",
                    "s",
                    (quantile(0.99, "ewsjf_longest_gap_seconds", "cause"), "{{cause}}"),
                ),
                line(
                    "Cached prompt tokens",
                    "As predicted at dispatch, and as engines reported. Apart: the prefix index is wrong.",
                    "short",
                    (rate("ewsjf_prefix_cached_tokens_total", "pool, kind"), "{{pool}} {{kind}}"),
                ),
                line(
                    "Queued tokens",
                    "Expected tokens of the queued requests.",
                    "short",
                    (gauge("ewsjf_queued_tokens", "model"), "{{model}}"),
                ),
            ),
        ),
        (
            "Versions",
            (
                Panel(
                    "Builds",
                    "Versions of all processes. More than one for long: an upgrade is stuck.",
                    "short",
                    (Query("count by (process, version, commit, ray, vllm) (ewsjf_build_info)"),),
                    kind="table",
                    width=24,
                ),
            ),
        ),
    ),
)
