"""Every command that plays a published trace says when it plays generated lengths instead."""

import json
from pathlib import Path

import pytest

from serve_app.cli import main
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from tests.bench.live import emulated_endpoint

FLEET = ["--replicas", "1", "--requests", "150", "--jobs", "1", "--rate", "1"]
COMMANDS = {
    "simulate": ["--policy", "direct", *FLEET],
    "tune": ["--trials", "1", "--window", "40", *FLEET],
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
    assert note.startswith("azure-conv: its file is not here, so lengths and arrivals are generated")
    trace = json.loads(out.read_text())["provenance"]["trace"]
    assert trace["generated_without_file"] == ["azure-conv"]


@pytest.mark.usefixtures("no_trace_files")
def test_a_load_test_says_it_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated_endpoint(EmulatedEngineSettings(served_model_names=("m",), max_model_len=32_768)) as url:
        assert main(["bench", "--url", url, "--trace", "azure-code", "--requests", "3", "--rate", "20"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("azure-code (generated lengths)")
    assert "scripts/fetch_traces" in shown.err


@pytest.mark.usefixtures("no_trace_files")
def test_merged_traces_name_the_generated_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n9,20,5\n")
    both = f"azure-code+{mine}"
    assert main(["simulate", "--trace", both, "--policy", "direct", *FLEET]) == 0
    assert capsys.readouterr().out.startswith(f"{both} (generated lengths of azure-code)")


def test_lengths_of_a_file_need_no_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"2023-11-16 18:17:{second:02}.0000000,{100 + second},10\n" for second in range(60))
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(
        f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}"
    )
    arguments = ["simulate", "--trace", "azure-conv", "--traces-folder", str(tmp_path), "--policy", "direct"]
    assert main([*arguments, *FLEET]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("azure-conv: ")
    assert "fetch_traces" not in shown.err
