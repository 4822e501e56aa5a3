"""Plots of a run: the distribution of TTFT, and a timeline."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from serve_app.metrics.record import RequestRecord


def write_plots(folder: Path, records: Sequence[RequestRecord], title: str, short_at_tokens: int) -> None:
    """Write `ttft_cdf.png` and `timeline.png` into `folder`, which is created if necessary.

    Args:
        records: on a clock that starts with the first arrival.
        title: of both plots.
        short_at_tokens: longest prompt in the curve of short prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cdf = Figure(figsize=(7, 4.5), layout="constrained")
    _ttft_cdf(cdf.subplots(), records, short_at_tokens)
    timeline = Figure(figsize=(9, 6), layout="constrained")
    above, below = timeline.subplots(2, sharex=True)
    _in_flight(above, records)
    _ttft_over_time(below, records)
    for name, figure in (("ttft_cdf.png", cdf), ("timeline.png", timeline)):
        figure.suptitle(title)
        figure.savefig(folder / name, dpi=120)


def _ttft_cdf(axes: Axes, records: Sequence[RequestRecord], short_at_tokens: int) -> None:
    curves = {
        "all": records,
        f"prompt up to {short_at_tokens} tokens": [
            record for record in records if record.prompt_tokens <= short_at_tokens
        ],
        "longer": [record for record in records if record.prompt_tokens > short_at_tokens],
    }
    for label, members in curves.items():
        ttfts_s = sorted(
            record.ttft_s for record in members if record.completed and record.ttft_s is not None
        )
        if ttfts_s:
            shares = [rank / len(ttfts_s) for rank in range(1, len(ttfts_s) + 1)]
            axes.step(ttfts_s, shares, where="post", label=f"{label} (n={len(ttfts_s):,})")
            axes.legend()
    axes.set(xlabel="TTFT from arrival, s", ylabel="share of completed requests", xscale="log", ylim=(0, 1))
    axes.grid(visible=True, alpha=0.3)


def _in_flight(axes: Axes, records: Sequence[RequestRecord]) -> None:
    """Requests that have arrived and not ended, and those of them without a token."""
    ends = [(record.arrived_at, record.finished_at) for record in records]
    waits = [(record.arrived_at, record.first_token_at or record.finished_at) for record in records]
    for label, spans in (("in the system", ends), ("without a token yet", waits)):
        steps = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        count, counts = 0, []
        for _, change in steps:
            count += change
            counts.append(count)
        axes.step([at for at, _ in steps], counts, where="post", label=label)
    axes.set(ylabel="requests")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _ttft_over_time(axes: Axes, records: Sequence[RequestRecord]) -> None:
    completed = [record for record in records if record.completed and record.ttft_s is not None]
    axes.scatter(
        [record.arrived_at for record in completed],
        [record.ttft_s or 0.0 for record in completed],
        s=5,
        alpha=0.6,
    )
    failed = [record for record in records if not record.completed]
    axes.plot([record.arrived_at for record in failed], [0.0] * len(failed), "x", color="tab:red", ms=4)
    axes.set(xlabel="arrival, s", ylabel="TTFT, s (x: not completed)")
    axes.grid(visible=True, alpha=0.3)
