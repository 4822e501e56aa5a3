"""Pictures of rows: every line, value and tick is in the SVG, and higher values are higher."""

from xml.etree import ElementTree as ET

import pytest

from experiments.common.picture import Line, Panel, drawn

SVG = "{http://www.w3.org/2000/svg}"
GATEWAY = Line("gateway", [0.25, 0.5, 12.0])
SCHEDULER = Line("scheduler & core", [0.125, 0.125, 0.125])


def panel(*, is_log: bool = False, lines: tuple[Line, ...] = (GATEWAY, SCHEDULER)) -> Panel:
    return Panel(title="By chunks", ticks=["1", "8", "1,000"], lines=lines, is_log=is_log)


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def heights(svg: str, line: int) -> list[float]:
    """Return the vertical positions of a line's points; the first path of its group has all of them."""
    groups = [group for group in ET.fromstring(svg).iter(f"{SVG}g") if group.get("class") == f"c{line}"]
    points = groups[-1].findall(f"{SVG}path")[0].attrib["d"].removeprefix("M").split()
    return [float(y) for y in points[1::2]]


def test_a_picture_has_its_series_values_ticks_and_titles() -> None:
    svg = drawn("Cost", "of a <request>", [panel(), panel(lines=(SCHEDULER,))])
    root = ET.fromstring(svg)
    assert root.findtext(f"{SVG}title") == "Cost"
    assert root.findtext(f"{SVG}desc") == "of a <request>"
    found = texts(svg)
    # One legend for both panels.
    assert [found.count(name) for name in ("gateway", "scheduler & core")] == [1, 1]
    assert found.count("By chunks") == 2
    assert found.count("1,000") == 2
    assert [found.count(value) for value in ("0.25", "0.5", "12", "0.12")] == [1, 1, 1, 6]


def test_the_label_of_a_higher_value_is_above_its_point_and_the_other_one_below() -> None:
    close = panel(lines=(Line("a", [1.0, 3.0, 2.0]), Line("b", [2.0, 2.9, 2.1])))
    svg = drawn("", "", [close])
    for line, sides in ((0, (1, -1, 1)), (1, (-1, 1, -1))):
        group = [each for each in ET.fromstring(svg).iter(f"{SVG}g") if each.get("class") == f"c{line}"][-1]
        labels = [float(text.attrib["y"]) for text in group.iter(f"{SVG}text")]
        points = heights(svg, line)
        assert [(label > point) - (label < point) for label, point in zip(labels, points, strict=True)] == [
            *sides
        ]


def test_a_linear_axis_begins_at_zero_and_a_logarithmic_one_at_the_least_value() -> None:
    (low, middle, high), (zero, *_) = heights(drawn("", "", [panel()]), 0), (156.0,)
    assert low > middle > high
    # In SVG a smaller coordinate is higher. Twice the value is twice as high above zero.
    assert (zero - middle) == pytest.approx(2 * (zero - low), abs=0.2)
    svg = drawn("", "", [panel(is_log=True)])
    (low, middle, high), others = heights(svg, 0), heights(svg, 1)
    # A doubling is the same step everywhere.
    assert others[0] - low == pytest.approx(low - middle, abs=0.2)
    assert len(set(others)) == 1
