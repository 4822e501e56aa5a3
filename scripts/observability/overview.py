"""How the application does, at a glance."""

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
    text="How the application does: traffic, latencies, targets kept, and what waits.",
    sections=(
        (
            "Now",
            (
                _stat("Requests", "Requests that ended, of all outcomes.", "reqps", _ALL),
                _stat(
                    "Within targets",
                    "Share of requests that kept the latency targets of their class.",
                    "percentunit",
                    attainment("model").replace("sum by (model) ", "sum "),
                ),
                _stat(
                    "Not served",
                    "Share of requests that were rejected for lack of capacity, expired or failed.",
                    "percentunit",
                    f"{_NOT_SERVED} / {_ALL} or 0 * {_ALL}",
                ),
                _stat("First token, P99", "Arrival to the first byte.", "s", quantile(0.99, TTFT)),
                _stat(
                    "Waiting",
                    "Requests in the queue.",
                    "short",
                    'sum(max by (model, class) (ewsjf_requests_waiting{model=~"$model"}))',
                ),
                _stat(
                    "In engines",
                    "Requests that were sent to replicas.",
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
                    "How requests end. What is rejected or fails shows here first.",
                    "reqps",
                    (rate("ewsjf_gateway_requests_total", "outcome"), "{{outcome}}"),
                    stacked=True,
                ),
                line(
                    "Tokens per second",
                    "Prompt and output tokens, as the engines counted them.",
                    "short",
                    (rate("ewsjf_gateway_tokens_total", "model, kind"), "{{model}} {{kind}}"),
                ),
                line(
                    "Within targets by class",
                    "Share of requests that kept the latency targets of their class.",
                    "percentunit",
                    (attainment("class"), "{{class}}"),
                    at_most=1,
                ),
                line(
                    "Requests waiting",
                    "Requests in the queue, by class.",
                    "short",
                    (gauge("ewsjf_requests_waiting", "model, class"), "{{model}} {{class}}"),
                    stacked=True,
                ),
            ),
        ),
        (
            "Latencies",
            (
                _by_class("Time to first token", "Arrival to the first byte of streamed answers.", TTFT),
                _by_class("Wait in the queue", "Arrival to the last grant, a part of the former.", WAIT),
                _by_class("Time per output token", "After the first token, mean of each answer.", TPOT),
                _by_class("Latency between tokens", "Gaps in streams; the tail shows stutter.", ITL),
                _by_class("End to end", "Arrival to conclusion of completed requests.", E2E),
                line(
                    "Added by the application, P99",
                    "Reading a request, asking the scheduler apart from the queue, and deciding.",
                    "s",
                    (quantile(0.99, "ewsjf_overhead_seconds", "stage"), "{{stage}}"),
                ),
            ),
        ),
        (
            "What runs",
            (
                Panel(
                    "Builds",
                    "Versions of all processes; more than one for long means an upgrade that got stuck.",
                    "short",
                    (Query("count by (process, version, commit, ray, vllm) (ewsjf_build_info)"),),
                    kind="table",
                    width=24,
                ),
            ),
        ),
    ),
)
