"""Tables of this experiment: targets met, calibration of the chance, and claims of one tenant."""

from collections.abc import Callable, Sequence

from experiments.common.picture import Line, Panel, drawn
from experiments.common.rows import Row, where
from experiments.common.tables import Column, Table, line_per_row, markdown
from experiments.targets.run import OURS, UNREFUSED

_MET = Column("met, of admitted, %", "admitted_met", 1, 100.0)
_GOODPUT = Column("met, of all, %", "goodput", 1, 100.0)
_REFUSED = Column("refused, %", "refused", 1, 100.0)
_OTHERS = Column("others' TTFT P99, s", "others_p99_s", 1)
_NARROW = [_MET, _GOODPUT, _REFUSED, _OTHERS]
_WIDE = [
    _MET,
    _GOODPUT,
    _REFUSED,
    Column("refused in vain, %", "false_refusals", 1, 100.0),
    Column("retries admitted, %", "retries_admitted", 1, 100.0),
    Column("others' TTFT mean, s", "others_mean_s"),
    _OTHERS,
    Column("others' goodput, %", "others_goodput", 1, 100.0),
    Column("tokens/s", "tokens_per_s", 0),
]
_CLAIMS = [
    Column("its TTFT mean, s", "claimant_mean_s"),
    Column("its tokens/s", "claimant_tokens_per_s", 0),
    Column("others' TTFT mean, s", "others_mean_s"),
    Column("others' tokens/s", "others_tokens_per_s", 0),
]


def _table(case: str, note: str, columns: Sequence[Column], *, shows_load: bool = False) -> Table:
    return Table(
        text=line_per_row({"requests/s": "{rate:g}", "variant": "{variant}"}, columns),
        where={"case": case},
        note=note,
        shows_load=shows_load,
    )


def _reliability(rows: Sequence[Row]) -> str:
    lines = [
        [f"{10 * place} to {10 * place + 10}", f"{count:,}", f"{100 * missed / count:.0f}" if count else "-"]
        for place, (count, missed) in enumerate(_bins(rows))
    ]
    return markdown(["predicted chance of a miss, %", "requests", "missed, %"], lines)


def _bins(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return the requests and misses of all runs, by tenth of the predicted chance."""
    columns = [zip(*_flat(rows, figure), strict=True) for figure in ("bin_counts", "bin_misses")]
    return [(sum(counts), sum(misses)) for counts, misses in zip(*columns, strict=True)]


def _picture(rows_of: Callable[[str], Sequence[Row]]) -> str:
    return drawn(
        "Predicted and actual misses of latency targets",
        "Percent of requests that missed, by the predicted chance, with nothing refused and with refusals",
        [
            _panel(title, where(rows_of("targets"), case=_SIMULATED, variant=variant))
            for title, variant in (("Nothing refused", UNREFUSED), ("Refused above 0.5", OURS))
        ],
    )


def _panel(title: str, rows: Sequence[Row]) -> Panel:
    known = [
        (place, 100 * missed / count) for place, (count, missed) in enumerate(_bins(rows)) if count >= _ENOUGH
    ]
    return Panel(
        title=f"{title}: missed, %",
        ticks=[f"{10 * place}-{10 * place + 10}" for place, _ in known],
        lines=[
            Line("predicted (middle)", [10.0 * place + 5 for place, _ in known]),
            Line("missed", [missed for _, missed in known]),
        ],
    )


# Requests of a tenth whose share is shown.
_ENOUGH = 15


def _flat(rows: Sequence[Row], figure: str) -> list[list[int]]:
    return [seed for row in rows for seed in row.figures.get(figure, ())]


_PACE = (
    Column("met, %", "met", 1, 100),
    Column("P99, ms", "tpot_p99_s", 0, 1_000),
    Column("others' mean, ms", "others_tpot_s", 1, 1_000),
    Column("TTFT of long prompts, s", "long_ttft_s", 1),
)
_PACE_NOTE = (
    "Times per output token of short requests, of which 30 % have a target of 30 ms, beside prompts of "
    "64,000 tokens. Four replicas of an 8B model on one H100 each."
)
_NOTE = (
    "Half of the requests have a target of 0.5 to 4 s and twice their own prefill; a refused one retries "
    "once at its `Retry-After`. Others are the requests without a target."
)
_CHANCE_NOTE = "All workloads and rates, with nothing refused, so that every outcome is known."
_CLAIM_NOTE = (
    "One of three heavy tenants claims a target for all its requests: 1 ms, or 0.2 s and twice their prefill."
)
_LIVE_NOTE = "Client-measured. Simulated rows have the same requests, times and targets."

_SIMULATED = ("mixed", "paper-mix", "tenants")
_LIVE = [_MET, _REFUSED, Column("retries admitted, %", "retries_admitted", 1, 100.0), _OTHERS]

TABLES = {
    "tenants": _table("tenants", _NOTE, _NARROW),
    "paper": _table("paper-mix", _NOTE, _NARROW),
    "all-mixed": _table("mixed", _NOTE, _WIDE),
    "all-paper": _table("paper-mix", _NOTE, _WIDE),
    "all-tenants": _table("tenants", _NOTE, _WIDE),
    "pace": Table(
        text=line_per_row({"chunk, tokens": "{chunk:,}", "variant": "{variant}"}, _PACE),
        where={"case": "pace"},
        note=_PACE_NOTE,
    ),
    "reliability": Table(
        text=_reliability, where={"case": _SIMULATED, "variant": UNREFUSED}, note=_CHANCE_NOTE
    ),
    "reliability-refused": Table(
        text=_reliability, where={"case": _SIMULATED, "variant": OURS}, note="All workloads and rates."
    ),
    "live": _table("live", _LIVE_NOTE, _LIVE, shows_load=True),
    "reliability-live": Table(text=_reliability, where={"case": "live", "variant": OURS}),
    "claims": _table("claims", _CLAIM_NOTE, _CLAIMS),
}
PICTURES = {"docs/images/targets.svg": _picture}
