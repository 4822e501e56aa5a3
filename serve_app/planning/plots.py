"""Plots of a plan: GPUs against `B_short`, tail latencies against GPUs, and the work of each pool."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from serve_app.planning.sizing.candidates import PlanResult, SizedFleet
from serve_app.planning.sizing.fleets import PAGED, POOLS, WORST_CASE
from serve_app.planning.sizing.verification import Verification, Verifier, at_full_size

_LOOKS = {WORST_CASE: ("C3", "v"), PAGED: ("C0", "o"), POOLS: ("C2", "s")}


def write_plots(folder: Path, result: PlanResult, verifier: Verifier) -> None:
    """Write `gpus_against_b_short.png`, `tails_against_gpus.png` and, with two pools, `work_split.png`.

    Args:
        folder: is created when it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "gpus_against_b_short.png": _borders(result),
        "tails_against_gpus.png": _tails(result, verifier),
    }
    if result.pools is not None:
        figures["work_split.png"] = _split(result.pools)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=130)


# GPUs against B_short


def _borders(result: PlanResult) -> Figure:
    figure = Figure(figsize=(11.5, 4.8), layout="constrained")
    gpus, cost = figure.subplots(1, 2)
    modelled = result.modelled
    borders = [one.plan.b_short_tokens for one in modelled]
    colour, marker = _LOOKS[POOLS]
    line = {"color": colour, "ls": "--", "marker": ".", "label": "pools, model"}
    gpus.plot(borders, [one.plan.gpus(one.counts) for one in modelled], **line)
    cost.plot(borders, [one.usd_per_hour for one in modelled], **line)
    simulated = [one for one in result.simulated if one.plan.name == POOLS]
    dots = {"color": colour, "marker": marker, "ls": "", "ms": 9, "label": "pools, simulated"}
    gpus.plot([one.plan.b_short_tokens for one in simulated], [one.gpus for one in simulated], **dots)
    cost.plot([one.plan.b_short_tokens for one in simulated], [one.usd_per_hour for one in simulated], **dots)
    for baseline in (result.paged, result.worst_case):
        if baseline is not None:
            look = {"color": _LOOKS[baseline.plan.name][0], "label": f"{baseline.plan.name}, simulated"}
            gpus.axhline(baseline.gpus, **look)
            cost.axhline(baseline.usd_per_hour, **look)
    gpus.set(ylabel="GPUs")
    cost.set(ylabel="US dollars an hour")
    for axes in (gpus, cost):
        axes.set(xlabel="B_short, tokens")
        axes.set_xscale("log", base=2)
        axes.set_xticks(borders, [f"{border:,}" for border in borders])
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.4)
    figure.legend(*gpus.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("fleet size against the border between pools")
    return figure


# Tails against GPUs


def _tails(result: PlanResult, verifier: Verifier) -> Figure:
    """The tail latencies of every fleet that was simulated, at its full size."""
    figure = Figure(figsize=(11.5, 4.8), layout="constrained")
    ttft, tpot = figure.subplots(1, 2)
    slo = verifier.demand.slo
    chosen = [one.plan for one in (result.worst_case, result.paged, result.pools) if one is not None]
    for plan in chosen:
        measured = [one for one in verifier.measured if one.plan == plan]
        _points(ttft, measured, verifier, [_mean(one, "ttft") for one in measured])
        _points(tpot, measured, verifier, [1_000 * _mean(one, "tpot") for one in measured])
    ttft.set(ylabel="P99 TTFT, s", yscale="log")
    tpot.set(ylabel="P99 TPOT, ms")
    for axes, limit in ((ttft, slo.ttft_s), (tpot, slo.tpot_s and 1_000 * slo.tpot_s)):
        if limit is not None:
            axes.axhline(limit, color="0.4", lw=1, ls=":", label="limit")
        axes.set(xlabel="GPUs")
        axes.grid(visible=True, alpha=0.4)
    figure.legend(*ttft.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("simulated sizes; hollow: misses a limit")
    return figure


def _points(
    axes: Axes, measured: Sequence[Verification], verifier: Verifier, values: Sequence[float]
) -> None:
    if not measured:
        return
    name = measured[0].plan.name
    colour, marker = _LOOKS[name]
    for place, (one, value) in enumerate(zip(measured, values, strict=True)):
        full = {pool: at_full_size(count, verifier.share) for pool, count in one.counts.items()}
        axes.plot(
            one.plan.gpus(full),
            value,
            marker,
            color=colour,
            mfc=colour if one.meets else "none",
            ms=7,
            label=name if place == 0 else None,
        )


def _mean(one: Verification, tail: str) -> float:
    interval = getattr(one, tail)
    return float("nan") if interval is None else float(interval.mean)


# Work split


def _split(pools: SizedFleet) -> Figure:
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = ("dollars", "GPUs", "tokens", "requests")
    left = [0.0] * len(rows)
    for pool, colour in zip(pools.plan.pools, ("C2", "C4"), strict=True):
        widths = _shares(pools, pool)
        axes.barh(rows, widths, left=left, color=colour, label=f"{pool}: {pools.plan.pools[pool]}")
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > 0.06:
                axes.text(start + width / 2, row, f"{width:.0%}", ha="center", va="center", color="white")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(xlim=(0, 1), xlabel="share of the fleet")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside lower center", ncols=1, frameon=False)
    replicas = ", ".join(f"{count:,} {pool}" for pool, count in pools.counts.items())
    figure.suptitle(f"work of each pool: {replicas} replicas, B_short = {pools.plan.b_short_tokens:,}")
    return figure


def _shares(pools: SizedFleet, pool: str) -> list[float]:
    figures = pools.verification.pool_figures(pool)
    alone = {name: count if name == pool else 0 for name, count in pools.counts.items()}
    gpus = pools.plan.gpus(alone) / pools.gpus
    costs = pools.usd_by_pool[pool] / pools.usd_per_hour
    return [costs, gpus, figures["token_ratio"] or 0.0, figures["request_ratio"] or 0.0]
