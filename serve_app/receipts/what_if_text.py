"""What would have helped a request, in lines for a person."""

from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.tables import shown_table


def told_what_if(result: Mapping[str, Any]) -> Iterator[str]:
    """A line about the replay, a table of changes, and the one that helps most."""
    replay, recorded = result["replay"], result["recorded"]
    begins = "from an idle fleet" if replay["begins_idle"] else "with what was under way"
    yield (
        f"what if: {replay['requests']:,} requests of {replay['seconds']:,.0f} s replayed {begins}, policy "
        f"{result['policy']}, engines' step times {replay['engines']}"
    )
    yield (
        f"unchanged, the replay has it wait {replay['wait_ms']:,.1f} ms; really it waited "
        f"{recorded['wait_ms']:,.1f} ms. Nine in ten requests like it are within "
        f"{replay['bar_ms']:,.1f} ms of the replay"
    )
    if not replay["reproduces"]:
        yield (
            "the replay does not reproduce this wait: it is off by more than its own error. The intervals "
            "below are as wide as what it misses"
        )
    rows = [_row(each) for each in result["changes"]]
    heads = ("change", "wait, ms", "nine in ten", "difference, ms", "first token, ms", "nine in ten")
    yield "\n" + shown_table(heads, rows)
    notes = [f"{each['label']}: {each['note']}" for each in result["changes"] if each["note"]]
    yield from notes
    yield "\n" + _best(result)


def _row(change: Mapping[str, Any]) -> tuple[str, ...]:
    wait, ttft = change["wait"], change["ttft"]
    if wait is None:
        return change["label"], "-", "", "", "", ""
    return (
        change["label"],
        f"{wait['ms']:,.0f}",
        _interval(wait),
        f"{wait['difference_ms']:+,.0f}",
        f"{ttft['ms']:,.0f}" if ttft is not None else "-",
        _interval(ttft) if ttft is not None else "",
    )


def _interval(told: Mapping[str, float]) -> str:
    return f"{told['low_ms']:,.0f} to {told['high_ms']:,.0f}"


def _best(result: Mapping[str, Any]) -> str:
    best = next((each for each in result["changes"] if each["label"] == result["best"]), None)
    if best is None:
        return "nothing of this would have helped by more than the replay's own error"
    wait = best["wait"]
    return (
        f"most would have helped: {best['label']}, a wait of {wait['ms']:,.0f} ms instead of "
        f"{result['recorded']['wait_ms']:,.0f} ms"
    )
