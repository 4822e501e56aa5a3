"""Single samples of a page of Prometheus text, found without parsing the rest of the page.

A page has 40 to 90 kB, most of it buckets of histograms, and a handful of its samples are needed. To find
those by name costs a few microseconds each, to parse all lines several hundred.

Source: the text format of Prometheus: the samples of a metric stand together, and the next metric begins
with a comment. Pages without comments are searched to their end.
"""

import math
import re
from collections.abc import Sequence

from serve_app.errors import EngineError

_LABEL = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def samples(page: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """The samples of one name, as (labels as written, value), without those that are no finite number.

    Raises:
        EngineError: the line of a sample holds no number.
    """
    if not page.startswith(b"#"):
        # Whatever else a page begins with is a sample.
        page = b"\n" + page
    # A sample with labels, or without: a longer name that begins with this one is another metric.
    return _lines_after(page, b"\n" + name + b"{") or _lines_after(page, b"\n" + name + b" ")


def values(page: bytes, names: Sequence[bytes]) -> list[float]:
    """The values of the first of the names that the page has; none when it has none of them."""
    for name in names:
        if found := samples(page, name):
            return [value for _, value in found]
    return []


def total(page: bytes, *names: bytes) -> float | None:
    """The sum of the first of the names that the page has; None when it has none of them."""
    found = values(page, names)
    return sum(found) if found else None


def count(page: bytes, *names: bytes) -> int | None:
    """The same for what is a number of things."""
    found = total(page, *names)
    return None if found is None else round(found)


def mean(page: bytes, *names: bytes) -> float | None:
    """The mean over the samples of the first of the names that the page has."""
    found = values(page, names)
    return sum(found) / len(found) if found else None


def first_of_each(found: list[tuple[bytes, float]], label: bytes) -> list[float]:
    """The value of the first sample for each value of a label, and of the first without that label."""
    if len(found) < 2:
        return [value for _, value in found]
    pattern = re.compile(rb"(?:^|,)" + label + rb'="([^"]*)"')
    firsts: dict[bytes, float] = {}
    for written, value in found:
        match = pattern.search(written)
        firsts.setdefault(match.group(1) if match else b"", value)
    return list(firsts.values())


def labels(written: bytes) -> dict[str, str]:
    """Labels by name, as `samples` gives them."""
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
        # Quotients without anything counted yet are NaN.
        if math.isfinite(sample[1]):
            found.append(sample)
        at = page.find(opening, end, metric_end)
    return found


def _sample(page: bytes, line: int, start: int, end: int) -> tuple[bytes, float]:
    """The sample of one line, whose labels or value begin at `start`."""
    # Values of labels may hold braces, and what follows the last brace holds none.
    closing = page.rfind(b"}", start, end)
    written, rest = (b"", page[start:end]) if closing < 0 else (page[start:closing], page[closing + 1 : end])
    try:
        # A time stamp may follow the value.
        return written, float(rest.split(None, 1)[0])
    except (ValueError, IndexError) as exc:
        shown = page[line:end][:200].decode("utf-8", "replace")
        raise EngineError(f"the metrics hold a line that is not Prometheus text: {shown!r}") from exc
