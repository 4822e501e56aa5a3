import base64
import hashlib
import json
import re
from pathlib import Path

from serve_app.lab.reports.page import report_as_html, write_report
from tests.lab.reports.builders import plot, report
from tests.lab.reports.parsed import ParsedReport

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--"


def scripts_of(page: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)


def test_names_are_text_wherever_they_occur() -> None:
    page = report_as_html(report(HOSTILE))
    parsed, harmless = ParsedReport(page), ParsedReport(report_as_html(report("ours")))
    # The elements are equal, so no name became markup. Words of a command line have one span each.
    expected = [tag for tag, _ in harmless.elements if tag != "span"]
    assert [tag for tag, _ in parsed.elements if tag != "span"] == expected
    assert parsed.inside("title")[0] == f"{HOSTILE} against theirs"
    assert {HOSTILE, f"Differences of {HOSTILE}"} <= {text.strip() for _, text in parsed.texts}
    assert parsed.table(f"{HOSTILE}: figures").texts == [
        ["policy", HOSTILE],
        [HOSTILE, "0.12"],
        ["theirs", "-"],
    ]


def test_the_script_gets_names_as_they_are() -> None:
    page = report_as_html(report(HOSTILE))
    (drawn,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert json.loads(drawn)["series"][1]["name"] == HOSTILE


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = report_as_html(report())
    parsed = ParsedReport(page)
    names = {name for _, attributes in parsed.elements for name in attributes}
    assert names.isdisjoint({"src", "href", "srcset", "action", "data", "poster", "background"})
    assert {tag for tag, _ in parsed.elements}.isdisjoint(
        {"link", "iframe", "object", "embed", "base", "img"}
    )
    (style,) = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    assert not re.search(r"url\(|@import|@font-face", style)
    for script in scripts_of(page):
        assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|sendBeacon|eval)\b", script)


def test_the_policy_allows_only_the_two_scripts_of_the_page() -> None:
    page = report_as_html(report())
    (policy,) = [
        attributes["content"]
        for tag, attributes in ParsedReport(page).elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    scripts = scripts_of(page)
    assert allowed == [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert len(allowed) == 2


def test_the_licence_of_the_plotting_library_is_included() -> None:
    library = scripts_of(report_as_html(report()))[0]
    assert library.startswith("/*! https://github.com/leeoniya/uPlot (v")
    assets = Path(__file__).parents[3] / "serve_app/lab/reports/assets"
    assert "MIT License" in (assets / "uPlot.LICENSE").read_text()
    # The only foreign asset of a report stays small.
    assert len(library) < 60_000


def test_without_a_script_the_verdict_the_tables_and_the_values_of_plots_are_there() -> None:
    parsed = ParsedReport(report_as_html(report()))
    for part in ("Is ours better than theirs?", "ours is better; see", "a file of ours", "abc"):
        assert part in parsed.text
    found = parsed.table("ours: differences")
    assert found.texts[0][-5:] == ["theirs", "ours", "difference", "95 % interval", "change"]
    assert found.texts[1] == ["mean TTFT", "better", "", "2.00", "1.00", "-1.00", "-1.50 to -0.50", "-50.0%"]
    assert found.values[1][3:6] == [2.0, 1.0, -1.0]
    values = parsed.tables[-1]
    assert values.texts[0] == ["TTFT", "theirs", "ours"]
    assert values.texts[1:3] == [["10 ms", "0.00%", "10.00%"], ["100 ms", "20.00%", "50.00%"]]
    assert values.texts[3] == ["1 s", "60.00%", "-"]


def test_a_plot_without_values_is_left_out() -> None:
    empty = [type(one)(name=one.name, values=[None] * 4) for one in plot().series]
    section = report().sections[0]
    bare = type(plot())(
        title="Nothing", reading="", x=plot().x, y=plot().y, positions=plot().positions, series=empty
    )
    page = report_as_html(report(sections=[type(section)(title="Empty", blocks=[bare])]))
    assert "<figure" not in page


def test_a_report_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(path, report())
    assert path.read_text().startswith("<!DOCTYPE html>")
