"""Notices of commands that replay a published trace with generated lengths."""

import json
from pathlib import Path

import numpy as np
import pytest

from serve_app.cli import main
from serve_app.lab.workloads import RECIPES, TRACES_VARIABLE, Trace, TraceError, WorkloadSettings, resolve

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.9799600,{100 + second},10\n" for second in range(0, 60, 2)
)


def lengths(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    prompts = np.array([request.prompt_tokens for request in trace.requests])
    return prompts, np.array([request.output_tokens for request in trace.requests])


def test_azure_names_read_the_file_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "AzureLLMInferenceTrace_code.csv").write_text(AZURE)
    trace = resolve(WorkloadSettings(trace="azure-code", folder=tmp_path))
    assert len(trace.requests) == 30
    assert trace.source.startswith("file ")


def test_the_folder_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(AZURE)
    monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path))
    assert len(resolve(WorkloadSettings(trace="azure-conv")).requests) == 30


@pytest.mark.usefixtures("no_trace_files")
def test_azure_names_are_generated_with_a_notice_if_there_is_no_file() -> None:
    trace = resolve(WorkloadSettings(trace="azure-conv", requests=20_000))
    assert trace.source.startswith("generated from percentiles of the Azure 2023 conversation trace")
    prompts, outputs = lengths(trace)
    assert np.percentile(prompts, [50, 90, 95]) == pytest.approx([1020, 2734, 4083], rel=0.05)
    assert prompts.mean() == pytest.approx(1155, rel=0.05)
    assert outputs.mean() == pytest.approx(211, rel=0.08)
    assert trace.rate_per_s == pytest.approx(5.53, rel=0.05)


def test_a_folder_that_was_given_must_have_the_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="run scripts/fetch_traces --out"):
        resolve(WorkloadSettings(trace="azure-code", folder=tmp_path))


def test_lmsys_follows_both_published_distributions() -> None:
    prompts, outputs = lengths(resolve(WorkloadSettings(trace="lmsys", requests=20_000)))
    for tokens, share in ((128, 0.2359), (512, 0.6383), (2048, 0.9483), (8192, 0.9965)):
        assert (prompts + outputs <= tokens).mean() == pytest.approx(share, abs=0.015)
    assert np.percentile(outputs, [50, 80, 95]) == pytest.approx([140, 325, 447], rel=0.06)
    assert outputs.mean() == pytest.approx(177, rel=0.08)


def test_paper_mix_is_four_fifths_short() -> None:
    prompts, outputs = lengths(resolve(WorkloadSettings(trace="paper-mix", requests=20_000)))
    assert ((prompts >= 32) & (prompts <= 256)).mean() == pytest.approx(0.8, abs=0.01)
    assert ((prompts >= 1024) & (prompts <= 4096)).mean() == pytest.approx(0.2, abs=0.01)
    assert outputs.mean() == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.usefixtures("no_trace_files")
def test_one_seed_gives_one_workload_and_seeds_differ(name: str) -> None:
    once, again, other = (resolve(WorkloadSettings(trace=name, requests=50, seed=seed)) for seed in (1, 1, 2))
    assert once == again
    assert once.requests != other.requests


@pytest.mark.usefixtures("no_trace_files")
@pytest.mark.parametrize("name", ["lmsys", "azure-code"])
def test_a_rate_and_a_duration_set_the_number_of_requests(name: str) -> None:
    trace = resolve(WorkloadSettings(trace=name, rate_per_s=50, duration_s=100, seed=3))
    assert len(trace.requests) == 5000
    assert trace.rate_per_s == pytest.approx(50, rel=0.35)


def test_a_file_is_cut_at_a_position_of_the_seed_and_scaled_exactly(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(AZURE)
    cuts = [
        resolve(WorkloadSettings(trace=str(path), requests=5, rate_per_s=4, seed=seed)) for seed in range(5)
    ]
    assert all(cut.rate_per_s == pytest.approx(4) for cut in cuts)
    assert len({cut.requests[0].prompt_tokens for cut in cuts}) > 1
    timed = resolve(WorkloadSettings(trace=str(path), duration_s=10))
    assert len(timed.requests) == 5


def test_tenants_and_priorities_are_drawn_on_demand() -> None:
    settings = WorkloadSettings(trace="lmsys", requests=200, tenants="a=1,b=1", priorities="batch=1")
    trace = resolve(settings)
    assert {request.tenant for request in trace.requests} == {"a", "b"}
    assert {request.priority for request in trace.requests} == {"batch"}
    plain = resolve(WorkloadSettings(trace="lmsys", requests=200))
    assert [one.prompt_tokens for one in plain.requests] == [one.prompt_tokens for one in trace.requests]


def test_merged_generators_cover_an_hour() -> None:
    trace = resolve(WorkloadSettings(trace="lmsys+paper-mix"))
    assert trace.span_s == pytest.approx(3_600, rel=0.05)
    assert len(trace.requests) == 36_000 + 72_000


def test_merged_traces_have_the_requested_size_and_rate() -> None:
    trace = resolve(WorkloadSettings(trace="lmsys+paper-mix", requests=300, rate_per_s=5.0))
    assert len(trace.requests) == 300
    assert trace.rate_per_s == pytest.approx(5.0, rel=0.01)


def test_a_name_that_is_neither_a_file_nor_known_is_rejected_with_the_names() -> None:
    with pytest.raises(
        TraceError, match="no trace 'azur': use a file, or one of azure-code, azure-conv, lmsys"
    ):
        resolve(WorkloadSettings(trace="azur"))


def test_contradictory_settings_are_rejected() -> None:
    with pytest.raises(TraceError, match="set requests or duration_s, not both"):
        WorkloadSettings(trace="lmsys", requests=5, duration_s=5)
    with pytest.raises(TraceError, match="rate_per_s must be positive, got -1"):
        WorkloadSettings(trace="lmsys", rate_per_s=-1)
    with pytest.raises(TraceError, match="seed must not be negative, got -3"):
        WorkloadSettings(trace="lmsys", seed=-3)


FLEET = ["--replicas", "1", "--requests", "150", "--jobs", "1", "--rate", "1"]
COMMANDS = {
    "simulate": ["--policy", "direct", *FLEET],
    "plan": [*FLEET[2:], "--seeds", "1", "--candidates", "1", "--profile-settings-only", "--b-short", "4096"],
}


@pytest.mark.usefixtures("no_trace_files")
@pytest.mark.parametrize("command", COMMANDS)
def test_generated_lengths_are_named_in_caption_note_and_provenance(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main([command, "--trace", "azure-conv", *COMMANDS[command], "--json", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("azure-conv (generated lengths)")
    (note,) = [line for line in shown.err.splitlines() if "scripts/fetch_traces" in line]
    assert note.startswith("azure-conv: its file is missing, so lengths and arrivals are generated")
    trace = json.loads(out.read_text())["provenance"]["trace"]
    assert trace["generated_without_file"] == ["azure-conv"]


@pytest.mark.usefixtures("no_trace_files")
def test_merged_traces_name_the_generated_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n9,20,5\n")
    both = f"azure-code+{mine}"
    assert main(["simulate", "--trace", both, "--policy", "direct", *FLEET]) == 0
    assert capsys.readouterr().out.startswith(f"{both} (generated lengths of azure-code)")


def test_lengths_of_a_file_need_no_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(AZURE)
    arguments = ["simulate", "--trace", "azure-conv", "--traces-folder", str(tmp_path), "--policy", "direct"]
    assert main([*arguments, *FLEET]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("azure-conv: ")
    assert "fetch_traces" not in shown.err
