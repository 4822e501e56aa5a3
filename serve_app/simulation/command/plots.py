"""Plots of simulated runs: short against long prompts, and distributions of TTFT (queues: `queue_plot`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, PercentFormatter
from numpy.typing import NDArray

from serve_app.metrics.confidence import interval_95
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.statistics import Distribution
from serve_app.simulation.command.queue_plot import queue_figure
from serve_app.simulation.run import DIRECT, ORACLE, RunResult

_MARKERS = "osD^vP*Xph<>"
_COLOURS = tuple(f"C{place}" for place in range(10))

_ByPolicy = Mapping[str, Sequence[RunResult]]


def write_plots(folder: Path, results: Sequence[RunResult]) -> list[Path]:
    """Write `frontier.png`, `ttft_cdf.png` and one `queues-POLICY.png` for each policy that has a queue.

    Args:
        folder: is made when it is not there.
        results: with their records, all of one trace and fleet; the queues are those of the first seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_policy: dict[str, list[RunResult]] = {}
    for result in results:
        by_policy.setdefault(result.settings.name, []).append(result)
    figures = {"frontier.png": _frontier(by_policy), "ttft_cdf.png": _cdfs(by_policy)}
    for policy, runs in by_policy.items():
        if runs[0].settings.policy != DIRECT:
            figures[f"queues-{policy}.png"] = queue_figure(runs[0], _title(runs[0]))
    paths = []
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=130)
        paths.append(folder / name)
    return paths


def _title(result: RunResult) -> str:
    settings, trace = result.settings, result.workload.trace
    load = "" if settings.load is None else f", load {settings.load:.2f}"
    replicas = sum(settings.fleet.replicas.values())
    fleet = f"{replicas} replicas of {settings.fleet.profile}"
    return f"{trace.name}{load}, {fleet}, {len(trace.requests):,} requests"


def _legend(result: RunResult) -> str:
    settings = result.settings
    return f"{settings.name} (not deployable)" if settings.policy == ORACLE else settings.name


def _look(by_policy: _ByPolicy) -> dict[str, tuple[str, str]]:
    """Colour and marker of each policy, the same in all plots."""
    return {
        policy: (_COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)])
        for place, policy in enumerate(by_policy)
    }


# Frontier


def _frontier(by_policy: _ByPolicy) -> Figure:
    figure = Figure(figsize=(11.5, 5.2), layout="constrained")
    panels: tuple[tuple[str, Callable[[Distribution], float | None]], ...] = (
        ("mean", lambda times: times.mean),
        ("p99", lambda times: times.p99),
    )
    for axes, (name, of) in zip(figure.subplots(1, 2), panels, strict=True):
        _frontier_panel(axes, by_policy, of)
        axes.set(
            xlabel=f"{name} TTFT of short prompts, s", ylabel=f"{name} TTFT of long prompts, s", title=name
        )
    runs = next(iter(by_policy.values()))
    seeds = f"{len(runs)} seeds, bars: 95 % intervals" if len(runs) > 1 else "1 seed"
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(f"{_title(runs[0])} ({seeds})\nnearer to the lower left is better")
    return figure


def _frontier_panel(axes: Axes, by_policy: _ByPolicy, of: Callable[[Distribution], float | None]) -> None:
    points: dict[str, tuple[float, float]] = {}
    for policy, (colour, marker) in _look(by_policy).items():
        short = _over_seeds([of(run.summary.ttft_s.short) for run in by_policy[policy]])
        long = _over_seeds([of(run.summary.ttft_s.long) for run in by_policy[policy]])
        if short is None or long is None:
            continue
        points[policy] = (short[0], long[0])
        axes.errorbar(
            short[0],
            long[0],
            xerr=short[1],
            yerr=long[1],
            fmt=marker,
            color=colour,
            ms=9,
            mec="white",
            elinewidth=1,
            ecolor=(colour, 0.5),
            label=_legend(by_policy[policy][0]),
        )
    _draw_front(axes, list(points.values()))
    _logarithmic(axes, "x", "y")


def _over_seeds(values: Sequence[float | None]) -> tuple[float, NDArray[np.float64]] | None:
    """The mean and its bar's lengths below and above; a logarithmic axis must not come near zero."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    interval = interval_95(known)
    half = 0.0 if interval.high is None else interval.high - interval.mean
    return interval.mean, np.array([[min(half, 0.9 * interval.mean)], [half]])


def _draw_front(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """A line along the policies that no other one beats on both axes."""
    front = [
        (x, y)
        for x, y in points
        if not any(other != (x, y) and other[0] <= x and other[1] <= y for other in points)
    ]
    if len(front) > 1:
        axes.plot(
            *zip(*sorted(front), strict=True), color="0.6", lw=1, ls="--", zorder=0, label="not dominated"
        )


def _logarithmic(axes: Axes, *names: str) -> None:
    """Make axes logarithmic, with ticks at 1, 2, 5 and 10 in plain numbers, and a grid."""
    axes.grid(visible=True, alpha=0.4)
    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


# Distributions


def _cdfs(by_policy: _ByPolicy) -> Figure:
    figure = Figure(figsize=(11.5, 5.2), layout="constrained")
    runs = next(iter(by_policy.values()))
    short_at_tokens = runs[0].settings.short_at_tokens
    panels: tuple[tuple[str, Callable[[RequestRecord], bool]], ...] = (
        (f"short: at most {short_at_tokens} tokens", lambda record: record.prompt_tokens <= short_at_tokens),
        ("long: all others", lambda record: record.prompt_tokens > short_at_tokens),
    )
    for axes, (name, belongs) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        count = _cdf_panel(axes, by_policy, belongs)
        axes.set(xlabel="TTFT from arrival, s", ylim=(0, 1.005), title=f"{name} (n = {count:,})")
        _logarithmic(axes, "x")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.axes[0].set_ylabel("share of requests")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    pooled = f", {len(runs)} seeds together" if len(runs) > 1 else ""
    figure.suptitle(f"{_title(runs[0])}{pooled}")
    return figure


def _cdf_panel(axes: Axes, by_policy: _ByPolicy, belongs: Callable[[RequestRecord], bool]) -> int:
    count = 0
    for policy, (colour, _) in _look(by_policy).items():
        times = np.sort(
            [
                record.ttft_s
                for run in by_policy[policy]
                for record in run.measured
                if record.completed and record.ttft_s is not None and belongs(record)
            ]
        )
        if len(times):
            shares = np.arange(1, len(times) + 1) / len(times)
            axes.step(times, shares, where="post", color=colour, label=_legend(by_policy[policy][0]), lw=1.4)
        count = max(count, len(times))
    axes.axhline(0.99, color="0.5", lw=0.8, ls=":")
    return count
