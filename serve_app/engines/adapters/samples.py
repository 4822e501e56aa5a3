"""Lookup of single samples in a page of Prometheus text, without parsing the rest of the page.

A page has 40 to 90 kB, most of it histogram buckets, and only a few samples are needed. A lookup by name
costs a few microseconds, parsing all lines several hundred.

Source: the Prometheus text format, in which the samples of a metric are contiguous and the next metric begins
with a comment. Pages without comments are searched to the end.
"""

import math
import re
from collections.abc import Sequence

from serve_app.errors import EngineError

_LABEL = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def samples(page: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """Return the finite samples of a metric as (unparsed labels, value).

    Raises:
        EngineError: a sample's line has no number.
    """
    if not page.startswith(b"#"):
        # The page begins with a sample, not with a comment.
        page = b"\n" + page
    # The delimiter excludes longer names that begin with this one.
    return _lines_after(page, b"\n" + name + b"{") or _lines_after(page, b"\n" + name + b" ")


def values(page: bytes, names: Sequence[bytes]) -> list[float]:
    """Return the values of the first name that the page has, or an empty list."""
    for name in names:
        if found := samples(page, name):
            return [value for _, value in found]
    return []


def total(page: bytes, *names: bytes) -> float | None:
    """Return the sum over the samples of the first name that the page has, or None."""
    found = values(page, names)
    return sum(found) if found else None


def count(page: bytes, *names: bytes) -> int | None:
    """Return `total` rounded to an integer."""
    found = total(page, *names)
    return None if found is None else round(found)


def mean(page: bytes, *names: bytes) -> float | None:
    """Return the mean over the samples of the first name that the page has, or None."""
    found = values(page, names)
    return sum(found) / len(found) if found else None


def first_of_each(found: list[tuple[bytes, float]], label: bytes) -> list[float]:
    """Return the first sample's value for each value of a label, counting a missing label as one value."""
    if len(found) < 2:
        return [value for _, value in found]
    pattern = re.compile(rb"(?:^|,)" + label + rb'="([^"]*)"')
    firsts: dict[bytes, float] = {}
    for written, value in found:
        match = pattern.search(written)
        firsts.setdefault(match.group(1) if match else b"", value)
    return list(firsts.values())


def labels(written: bytes) -> dict[str, str]:
    """Parse labels as returned by `samples`."""
    return {name.decode(): value.decode("utf-8", "replace") for name, value in _LABEL.findall(written)}


def _lines_after(page: bytes, opening: bytes) -> list[tuple[bytes, float]]:
    at = page.find(opening)
    if at < 0:
        return []
    metric_end = page.find(b"\n#", at + 1)
    if metric_end < 0:
        metric_end = len(page)
    found = []
    while 0 <= at < metric_end:
        start = at + len(opening)
        end = page.find(b"\n", start)
        end = len(page) if end < 0 else end
        sample = _sample(page, at + 1, start, end)
        # Ratios are NaN until something was counted.
        if math.isfinite(sample[1]):
            found.append(sample)
        at = page.find(opening, end, metric_end)
    return found


def _sample(page: bytes, line: int, start: int, end: int) -> tuple[bytes, float]:
    """Parse the sample of one line, whose labels or value begin at `start`."""
    # Label values may contain braces. The value and the timestamp after the last brace contain none.
    closing = page.rfind(b"}", start, end)
    written, rest = (b"", page[start:end]) if closing < 0 else (page[start:closing], page[closing + 1 : end])
    try:
        # A timestamp may follow the value.
        return written, float(rest.split(None, 1)[0])
    except (ValueError, IndexError) as exc:
        shown = page[line:end][:200].decode("utf-8", "replace")
        raise EngineError(f"the metrics have a line that is not Prometheus text: {shown!r}") from exc
