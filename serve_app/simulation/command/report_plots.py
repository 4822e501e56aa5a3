"""The plots of the report of simulated runs: times to first token, by length, and over time."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from serve_app.metrics.record import RequestRecord
from serve_app.reports.document import Plot
from serve_app.reports.latency_plots import distribution_plot, length_plots, waiting_plot
from serve_app.simulation.run import RunResult

ByPolicy = Mapping[str, Sequence[RunResult]]
"""Runs with their records, by the name of their policy."""


def ttft_plots(by_policy: ByPolicy, base: str) -> Iterator[Plot]:
    """The distribution of the TTFT, of short prompts and of long ones, and the TTFT by length."""
    for title, records in _by_size(by_policy, lambda run: run.measured):
        yield distribution_plot(f"Distribution: {title}", records, base)
    yield from length_plots(
        {name: [each for run in runs for each in run.measured] for name, runs in by_policy.items()}, base
    )


def timeline_plots(by_policy: ByPolicy, base: str) -> Iterator[Plot]:
    """Who waits for a first token, over the run of the first seed."""
    firsts = {name: runs[:1] for name, runs in by_policy.items()}
    for title, records in _by_size(firsts, lambda run: run.records):
        yield waiting_plot(f"Waiting for a first token: {title}", records, base)


def _by_size(
    by_policy: ByPolicy, records_of: Callable[[RunResult], Sequence[RequestRecord]]
) -> Iterator[tuple[str, dict[str, list[RequestRecord]]]]:
    """The records of short and of long prompts, by policy."""
    short_at = next(iter(by_policy.values()))[0].settings.short_at_tokens
    sizes: tuple[tuple[str, Callable[[int], bool]], ...] = (
        (f"short prompts, at most {short_at:,} tokens", lambda tokens: tokens <= short_at),
        ("long prompts, all others", lambda tokens: tokens > short_at),
    )
    for title, belongs in sizes:
        yield (
            title,
            {
                name: [each for run in runs for each in records_of(run) if belongs(each.prompt_tokens)]
                for name, runs in by_policy.items()
            },
        )
