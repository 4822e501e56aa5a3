"""Report of `simulate`: it agrees with the JSON output."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.core.metrics.confidence import paired_difference_95
from tests.lab.reports.parsed import ParsedReport

SIMULATE = ["simulate", "--trace", "paper-mix", "--profile", "laptop", "--replicas", "1", "--jobs", "1"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[ParsedReport, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("report")
    arguments = ["--policy", "ewsjf,fcfs", "--seeds", "3", "--requests", "300", "--load", "0.9"]
    arguments += ["--tenants", "<b>mean</b>=2,kind=1"]
    arguments += ["--report", str(folder / "r.html"), "--json", str(folder / "r.json")]
    assert main([*SIMULATE, *arguments]) == 0
    return ParsedReport((folder / "r.html").read_text()), json.loads((folder / "r.json").read_text())


def mean_over_seeds(runs: list[dict[str, Any]], policy: str, *path: str) -> float:
    values = []
    for run in runs:
        if run["policy"] == policy:
            found = run
            for name in path:
                found = found[name]
            values.append(float(found))  # type: ignore[arg-type]
    assert len(values) == 3
    return sum(values) / 3


def test_its_figures_are_those_of_the_json_output(written: tuple[ParsedReport, dict[str, Any]]) -> None:
    page, found = written
    figures, percentiles = page.table("Every policy"), page.table("Percentiles of the TTFT")
    for policy in ("fcfs", "ewsjf"):
        mean = mean_over_seeds(found["runs"], policy, "metrics", "ttft_s", "short", "mean")
        assert figures.column("short TTFT mean s")[policy] == pytest.approx(mean)
        assert figures.column("goodput /s")[policy] == pytest.approx(
            mean_over_seeds(found["runs"], policy, "metrics", "goodput_per_s")
        )
    rows = {
        (texts[0], texts[1]): row for texts, row in zip(percentiles.texts, percentiles.values, strict=True)
    }
    for size in ("short", "long"):
        for place, name in enumerate(("p50", "p95", "p99", "max"), start=2):
            assert rows["ewsjf", size][place] == pytest.approx(
                mean_over_seeds(found["runs"], "ewsjf", "metrics", "ttft_s", size, name)
            )


def test_differences_are_from_the_baseline_seed_by_seed(
    written: tuple[ParsedReport, dict[str, Any]],
) -> None:
    page, found = written
    table = page.table("ewsjf against fcfs")
    values = {
        policy: [
            run["metrics"]["ttft_s"]["short"]["mean"] for run in found["runs"] if run["policy"] == policy
        ]
        for policy in ("ewsjf", "fcfs")
    }
    expected = paired_difference_95(values["ewsjf"], values["fcfs"])
    (row,) = [texts for texts in table.texts if texts[0] == "mean TTFT of short prompts"]
    assert table.column("difference")["mean TTFT of short prompts"] == pytest.approx(expected.mean)
    assert expected.low is not None
    assert expected.high is not None
    assert row[table.texts[0].index("95 % interval")] == f"{expected.low:+,.3f} to {expected.high:+,.3f}"
    assert row[1] == (
        "better" if expected.high < 0 else "worse" if expected.low > 0 else "no clear difference"
    )


def test_it_states_the_question_and_the_origin(
    written: tuple[ParsedReport, dict[str, Any]],
) -> None:
    page, found = written
    assert "Does ewsjf serve paper-mix better than fcfs on 1 simulated replica of laptop?" in page.text
    assert found["provenance"]["trace"]["source"] in page.text
    assert str(found["provenance"]["commit"] or "-") in page.text
    assert "--policy ewsjf,fcfs --seeds 3" in page.text
    # The tenant's name contains markup, which must appear as text.
    assert "<b>mean</b>" in page.table("Mean TTFT of tenants").column("ewsjf")


def test_a_policy_alone_is_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    assert main([*SIMULATE, "--requests", "100", "--rate", "5", "--report", str(path)]) == 0
    page = ParsedReport(path.read_text())
    assert "ewsjf was simulated without a baseline" in page.text
    assert "better in" not in page.text


def test_one_seed_is_not_called_better(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    arguments = ["--policy", "fcfs,ewsjf", "--requests", "200", "--load", "0.9", "--report", str(path)]
    assert main([*SIMULATE, *arguments]) == 0
    page = ParsedReport(path.read_text())
    assert "with 1 seed, which gives no confidence interval, so the differences may be chance" in page.text
    assert {row[1] for row in page.table("ewsjf against fcfs").texts[1:]} == {"no interval"}


def test_a_place_where_no_report_can_be_is_rejected_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place, message in ((tmp_path, "must name a file"), (tmp_path / "file" / "r.html", "is a file")):
        with pytest.raises(SystemExit) as ended:
            main([*SIMULATE, "--report", str(place)])
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""


def test_learned_queues_are_those_of_the_json_output(tmp_path: Path) -> None:
    path, out = tmp_path / "r.html", tmp_path / "r.json"
    arguments = ["--requests", "1200", "--load", "0.9", "--report", str(path), "--json", str(out)]
    assert main([*SIMULATE, *arguments]) == 0
    learned = json.loads(out.read_text())["runs"][0]["partitions"][-1]
    table = ParsedReport(path.read_text()).table("Length queues at the end")
    assert table.values[1][2:] == [len(learned["queues"]), learned["at_s"]]
    assert table.texts[1][1] == ", ".join(f"{one['min']:,}-{one['max']:,}" for one in learned["queues"])
