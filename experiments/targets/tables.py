"""Tables of this experiment: targets met, calibration of the chance, and claims of one tenant."""

from collections.abc import Callable, Sequence

from experiments.common.picture import Line, Panel, drawn
from experiments.common.rows import Row, where
from experiments.common.tables import Table, load_note, markdown, plus_minus
from experiments.targets.run import OURS, UNREFUSED

# Heading, figure, decimals, factor.
Columns = Sequence[tuple[str, str, int, float]]

_MET = ("met, of admitted, %", "admitted_met", 1, 100.0)
_GOODPUT = ("met, of all, %", "goodput", 1, 100.0)
_REFUSED = ("refused, %", "refused", 1, 100.0)
_OTHERS = ("others' TTFT P99, s", "others_p99_s", 1, 1.0)
_NARROW: Columns = [_MET, _GOODPUT, _REFUSED, _OTHERS]
_WIDE: Columns = [
    _MET,
    _GOODPUT,
    _REFUSED,
    ("refused in vain, %", "false_refusals", 1, 100.0),
    ("retries admitted, %", "retries_admitted", 1, 100.0),
    ("others' TTFT mean, s", "others_mean_s", 2, 1.0),
    _OTHERS,
    ("others' goodput, %", "others_goodput", 1, 100.0),
    ("tokens/s", "tokens_per_s", 0, 1.0),
]
_CLAIMS: Columns = [
    ("its TTFT mean, s", "claimant_mean_s", 2, 1.0),
    ("its tokens/s", "claimant_tokens_per_s", 0, 1.0),
    ("others' TTFT mean, s", "others_mean_s", 2, 1.0),
    ("others' tokens/s", "others_tokens_per_s", 0, 1.0),
]


def _text(columns: Columns, *, with_case: bool = False) -> Callable[[Sequence[Row]], str]:
    def text(rows: Sequence[Row]) -> str:
        lines = [
            [
                *([str(row.key["case"])] if with_case else []),
                f"{row.key['rate']:g}",
                str(row.key["variant"]),
                *(plus_minus(row.figures[name], digits, scale=scale) for _, name, digits, scale in columns),
            ]
            for row in rows
        ]
        head = [*(["workload"] if with_case else []), "requests/s", "variant"]
        return markdown([*head, *(column[0] for column in columns)], lines, text_columns=len(head))

    return text


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


def _pace(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{row.key['chunk']:,}",
            str(row.key["variant"]),
            plus_minus(row.figures["met"], 1, scale=100.0),
            plus_minus(row.figures["tpot_p99_s"], 0, scale=1_000.0),
            plus_minus(row.figures["others_tpot_s"], 1, scale=1_000.0),
            plus_minus(row.figures["long_ttft_s"], 1),
        ]
        for row in rows
    ]
    head = ["chunk, tokens", "variant", "met, %", "P99, ms", "others' mean, ms", "TTFT of long prompts, s"]
    return markdown(head, lines, text_columns=2)


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
_LIVE: Columns = [_MET, _REFUSED, ("retries admitted, %", "retries_admitted", 1, 100.0), _OTHERS]


def _live(rows: Sequence[Row]) -> str:
    return f"{_text(_LIVE)(rows)}\n\n{load_note(rows)}"


TABLES = {
    "tenants": Table(text=_text(_NARROW), where={"case": "tenants"}, note=_NOTE),
    "paper": Table(text=_text(_NARROW), where={"case": "paper-mix"}, note=_NOTE),
    "all-mixed": Table(text=_text(_WIDE), where={"case": "mixed"}, note=_NOTE),
    "all-paper": Table(text=_text(_WIDE), where={"case": "paper-mix"}, note=_NOTE),
    "all-tenants": Table(text=_text(_WIDE), where={"case": "tenants"}, note=_NOTE),
    "pace": Table(text=_pace, where={"case": "pace"}, note=_PACE_NOTE),
    "reliability": Table(
        text=_reliability, where={"case": _SIMULATED, "variant": UNREFUSED}, note=_CHANCE_NOTE
    ),
    "reliability-refused": Table(
        text=_reliability, where={"case": _SIMULATED, "variant": OURS}, note="All workloads and rates."
    ),
    "live": Table(text=_live, where={"case": "live"}, note=_LIVE_NOTE),
    "reliability-live": Table(text=_reliability, where={"case": "live", "variant": OURS}),
    "claims": Table(text=_text(_CLAIMS), where={"case": "claims"}, note=_CLAIM_NOTE),
}
PICTURES = {"docs/images/targets.svg": _picture}
