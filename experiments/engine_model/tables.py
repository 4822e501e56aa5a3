"""Tables and the picture of this experiment."""

from collections.abc import Callable, Sequence

from experiments.common.picture import Line, Panel, drawn
from experiments.common.rows import Row, where
from experiments.common.tables import Computed, Table, line_per_row

_SYNC, _ASYNC = {"scheduling": "vllm"}, {"scheduling": "vllm-async"}


def _percent(heading: str, figure: str, *, sign: str = "+") -> Computed:
    return Computed(heading, lambda row: f"{100 * row.figures[figure]:{sign}.2f}")


def _pair(heading: str, figure: str) -> Computed:
    return Computed(
        heading, lambda row: f"{row.figures[f'{figure}_model']:,.0f} / {row.figures[f'{figure}_vllm']:,.0f}"
    )


_IDENTICAL = Computed("identical steps, %", lambda row: f"{100 * row.figures['identical_steps']:.2f}")
_DEVIATIONS = (
    _percent("TTFT mean, %", "ttft_mean"),
    _percent("P99, %", "ttft_p99"),
    _percent("TPOT mean, %", "tpot_mean"),
    _percent("P99, %", "tpot_p99"),
)
_EACH = (
    _percent("TTFT of a request: mean, %", "ttft_each_mean", sign=""),
    _percent("P99, %", "ttft_each_p99", sign=""),
    _percent("TPOT of a request: mean, %", "tpot_each_mean", sign=""),
    _percent("P99, %", "tpot_each_p99", sign=""),
)
_COUNTS = (_pair("cached tokens, model / vLLM", "hits"), _pair("preemptions", "preemptions"))
_ADDED = Computed("TTFT added, ms", lambda row: f"{row.figures['ttft_added_ms']:.1f}")
_NOTE = "Deviations of the model from vLLM"


def _table(columns: Sequence[Computed]) -> Callable[[Sequence[Row]], str]:
    return line_per_row({"traces": "{class}"}, columns)


def _judgement(rows: Sequence[Row]) -> str:
    """Return a line per class: the steps of synchronous scheduling, and what the other one adds."""

    def identical(row: Row) -> str:
        return _IDENTICAL.cell(_row(rows, str(row.key["class"]), _SYNC))

    columns = (
        Computed("synchronous: identical steps, %", identical),
        Computed("asynchronous: TTFT added, ms", _ADDED.cell),
        _percent("TTFT mean, %", "ttft_mean"),
        _percent("TPOT mean, %", "tpot_mean"),
        _percent("TPOT P99, %", "tpot_p99"),
    )
    return line_per_row({"traces": "{class}"}, columns)(where(rows, **_ASYNC))


TABLES = {
    "judgement": Table(text=_judgement, note=f"{_NOTE} in percent"),
    "sync": Table(
        text=_table((_IDENTICAL, *_DEVIATIONS, *_EACH, *_COUNTS)), where=_SYNC, note=f"{_NOTE}, synchronous"
    ),
    "async": Table(
        text=_table((_ADDED, *_DEVIATIONS, *_EACH, *_COUNTS)), where=_ASYNC, note=f"{_NOTE}, asynchronous"
    ),
}

_SHOWN = {
    "roomy": "roomy",
    "small batches": "small",
    "prefixes": "prefix",
    "KV pressure": "KV",
    "azure-conv": "conv",
    "azure-code": "code",
}


def picture(rows: Sequence[Row]) -> str:
    """Return the deviations of the means from both kinds of vLLM's scheduling."""
    return drawn(
        "Deviation of the engine model from vLLM's scheduler",
        "Percent by which the mean TTFT and TPOT of the model deviate from those of vLLM's synchronous and "
        "asynchronous scheduling, by class of traces",
        [_panel("TTFT", "ttft_mean", rows), _panel("TPOT", "tpot_mean", rows)],
    )


def _panel(title: str, figure: str, rows: Sequence[Row]) -> Panel:
    names = [name for name in _SHOWN if where(rows, **{"class": name})]
    return Panel(
        title=f"{title}: deviation of the mean, %",
        ticks=[_SHOWN[name] for name in names],
        lines=[
            Line(label, [100 * abs(float(_row(rows, name, key).figures[figure])) for name in names])
            for label, key in (("synchronous", _SYNC), ("asynchronous", _ASYNC))
        ],
    )


def _row(rows: Sequence[Row], name: str, key: dict[str, str]) -> Row:
    (row,) = where(rows, **{"class": name, **key})
    return row


PICTURES = {"docs/images/engine-model-vllm.svg": lambda rows_of: picture(rows_of("engine_model"))}
