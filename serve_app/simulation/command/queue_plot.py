"""The plot of the queues of a simulated run over time, with the times at which queues were learned.

A row is a length queue, the shortest prompts at the bottom. After queues have been learned, the rows are the
queues in force at the end, also for requests that waited before or in a bubble queue. A row is then the range
from the beginning of its queue to that of the next.
"""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from serve_app.metrics.record import RequestRecord
from serve_app.scheduling.policies.partition import Partition
from serve_app.simulation.run import RunResult

_TIME_BINS = 240
# More rows than this cannot be told apart; such queues are drawn by length instead.
_MAX_QUEUES = 32
_OCTAVE_PARTS = 2


def queue_figure(result: RunResult, title: str) -> Figure:
    """The number waiting in each queue, and of short and long prompts, over the whole run."""
    records = [record for record in result.records if record.dispatched_at is not None]
    end_s = max((record.dispatched_at or 0.0 for record in records), default=1.0)
    edges = np.linspace(0.0, max(end_s, 1e-9), _TIME_BINS + 1)
    rows = _by_learned_queue(records, result.partitions[-1][1]) if result.partitions else _rows(records)
    figure = Figure(figsize=(11, 3.4 + 0.16 * len(rows)), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(0.5 + 0.08 * len(rows), 1))
    _queue_map(figure, above, rows, edges)
    _waiting_lines(below, records, result.settings.short_at_tokens, edges)
    _mark_changes(above, [at_s for at_s, _ in result.partitions if at_s > 0.0])
    _mark_arrivals_end(above, below, max((record.arrived_at for record in result.records), default=0.0))
    below.set(xlabel="time, s", ylabel="waiting requests", xlim=(0, edges[-1]), ylim=(0, None))
    figure.suptitle(f"{result.settings.name}: {title}, seed {result.settings.seed}")
    return figure


def _rows(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Records by length queue, the shortest prompts first; by length where there are too many queues."""
    by_queue: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_queue.setdefault(record.length_queue, []).append(record)
    if len(by_queue) > _MAX_QUEUES:
        by_queue = _by_length(records)

    def middle(name: str) -> float:
        return float(np.median([record.prompt_tokens for record in by_queue[name]]))

    return {name: by_queue[name] for name in sorted(by_queue, key=middle)}


def _by_learned_queue(
    records: Sequence[RequestRecord], partition: Partition
) -> dict[str, list[RequestRecord]]:
    """All learned queues, also those in which no request waited."""
    starts = [queue.min_tokens for queue in partition.intervals]
    rows: list[list[RequestRecord]] = [[] for _ in starts]
    for record in records:
        rows[max(0, bisect.bisect_right(starts, record.prompt_tokens) - 1)].append(record)
    names = (f"{queue.min_tokens:,}-{queue.max_tokens:,}" for queue in partition.intervals)
    return dict(zip(names, rows, strict=True))


def _by_length(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    by_length: dict[str, list[RequestRecord]] = {}
    for record in records:
        part = int(_OCTAVE_PARTS * np.log2(max(1, record.prompt_tokens)))
        low, high = (round(2 ** ((part + step) / _OCTAVE_PARTS)) for step in (0, 1))
        by_length.setdefault(f"{low:,}-{high:,} tokens", []).append(record)
    return by_length


def _queue_map(
    figure: Figure, axes: Axes, rows: Mapping[str, Sequence[RequestRecord]], edges: NDArray[np.float64]
) -> None:
    waiting = np.array([_waiting(members, edges) for members in rows.values()] or [np.zeros(_TIME_BINS)])
    # A linear scale would show the worst moment only. Empty queues are white.
    norm = PowerNorm(0.5, vmin=0, vmax=max(1.0, float(waiting.max())))
    not_empty = np.where(waiting < 0.005, np.nan, waiting)
    mesh = axes.pcolormesh(edges, np.arange(len(waiting) + 1), not_empty, cmap="YlOrRd", norm=norm)
    bar = figure.colorbar(mesh, ax=axes, pad=0.01)
    bar.set_label("waiting")
    axes.set_yticks(
        np.arange(len(rows)) + 0.5, [_row_label(name, rows[name]) for name in rows], fontsize="small"
    )
    axes.set_ylabel("length queue")


def _row_label(name: str, members: Sequence[RequestRecord]) -> str:
    # A learned queue is named by its bounds.
    if any(character.isdigit() for character in name):
        return name
    lengths = [record.prompt_tokens for record in members]
    return f"{name}: {min(lengths):,}-{max(lengths):,}"


def _waiting_lines(
    axes: Axes, records: Sequence[RequestRecord], short_at_tokens: int, edges: NDArray[np.float64]
) -> None:
    classes = {
        "short": [record for record in records if record.prompt_tokens <= short_at_tokens],
        "long": [record for record in records if record.prompt_tokens > short_at_tokens],
    }
    middles = (edges[:-1] + edges[1:]) / 2
    for (name, members), colour in zip(classes.items(), ("tab:blue", "tab:red"), strict=True):
        axes.plot(middles, _waiting(members, edges), label=f"{name} prompts", color=colour, lw=1.2)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left", frameon=False)


def _waiting(records: Sequence[RequestRecord], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean number of waiting requests in each bin of time: seconds waited in it, by its width."""
    arrived = np.array([record.arrived_at for record in records])
    dispatched = np.array([record.dispatched_at for record in records], dtype=np.float64)
    # The integral of the number waiting, up to each edge.
    waited_s = [float(np.sum(np.clip(np.minimum(dispatched, edge) - arrived, 0.0, None))) for edge in edges]
    return np.diff(waited_s) / np.diff(edges)


def _mark_changes(axes: Axes, times_s: Sequence[float]) -> None:
    """Draw a line where queues were learned or adjusted."""
    for number, at_s in enumerate(times_s):
        axes.axvline(at_s, color="tab:green", lw=1, ls="--", label=None if number else "queues learned")
    if times_s:
        axes.legend(loc="lower right", frameon=False, fontsize="small")


def _mark_arrivals_end(above: Axes, below: Axes, at_s: float) -> None:
    for axes in (above, below):
        axes.axvline(at_s, color="0.3", lw=0.8, ls=":")
    above.annotate(
        "last arrival",
        (at_s, 1.0),
        (0, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize="small",
    )
