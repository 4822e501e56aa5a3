import gzip
from pathlib import Path

import pytest

from serve_app.lab.workloads import TraceError, TraceRequest, describe_skipped, load_trace
from serve_app.request import PriorityClass

SHARED_TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_timestamps_preserve_all_seven_decimals(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951692,396,109\n",
    )
    loaded = load_trace(path)
    assert [request.arrival_s for request in loaded.requests] == [0.0, pytest.approx(4.3145792, abs=1e-6)]
    assert loaded.requests[1].prompt_tokens == 396
    assert loaded.requests[1].output_tokens == 109
    assert "azure" in loaded.source


def test_azure_2024_timestamps_with_a_time_zone_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2024-05-12 00:00:00.003948+00:00,2162,5\r\n"
        "2024-05-12 00:00:01+00:00,2399,6\r\n",
    )
    loaded = load_trace(path)
    assert loaded.requests[1].arrival_s == pytest.approx(0.996052)


def test_mooncake_blocks_become_the_prefix(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"timestamp": 3000, "input_length": 915, "output_length": 355, "hash_ids": [0, 462]}\n'
        '{"timestamp": 4500, "input_length": 7, "output_length": 2, "hash_ids": [0]}\n',
    )
    first, second = load_trace(path).requests
    assert first == TraceRequest(arrival_s=0.0, prompt_tokens=915, output_tokens=355, prefix=(0, 462))
    assert second.arrival_s == 1.5


def test_burstgpt_failures_are_counted_and_not_turned_into_requests(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,API log\n"
        "118.5,GPT-4,417,276,693,Conversation log\n",
    )
    loaded = load_trace(path)
    assert [request.prompt_tokens for request in loaded.requests] == [472, 417]
    assert loaded.requests[1].arrival_s == 113.5
    assert describe_skipped(loaded) == "1 rows skipped: Response tokens is below 1 (first: line 3)"
    assert loaded.provenance()["skipped_rows"] == {"Response tokens is below 1": 1}


def test_plain_rows_may_name_tenant_and_priority(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "arrival_s,prompt_tokens,output_tokens,tenant,priority\n2.5,10,20,search,batch\n0.5,30,40,,\n",
    )
    first, second = load_trace(path).requests
    assert (first.arrival_s, first.tenant, first.priority) == (0.0, "default", PriorityClass.DEFAULT)
    assert (second.arrival_s, second.tenant, second.priority) == (2.0, "search", PriorityClass.BATCH)


def test_each_unreadable_row_is_counted_under_its_reason_with_the_first_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "arrival_s,prompt_tokens,output_tokens\n0,10,20\nsoon,10,20\n1,ten,20\n2,10\n3,10,nan\nlater,1,1\n4,1.5,2\n",
    )
    loaded = load_trace(path)
    assert len(loaded.requests) == 1
    assert loaded.skipped is not None
    counted = {reason: (rows.count, rows.first) for reason, rows in loaded.skipped.items()}
    assert counted == {
        "arrival_s is not a number": (2, "line 3"),
        "prompt_tokens is not a number": (1, "line 4"),
        "no output_tokens": (1, "line 5"),
        "output_tokens is not finite": (1, "line 6"),
        "prompt_tokens is not a whole number": (1, "line 8"),
    }


def test_broken_json_lines_are_counted(tmp_path: Path) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 5}\n'
    path = write(tmp_path, good + '{"timestamp": 1, "inp\n[1, 2]\n')
    loaded = load_trace(path)
    assert len(loaded.requests) == 1
    assert loaded.skipped is not None
    assert sum(rows.count for rows in loaded.skipped.values()) == 2


def test_gzip_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,2,2\n")
    assert len(load_trace(path).requests) == 2


def test_an_unknown_format_names_the_file_its_first_line_and_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "when,what\n1,2\n")
    with pytest.raises(TraceError, match=r"'when,what.*azure: ContextTokens.*mooncake"):
        load_trace(path)


def test_a_file_without_a_single_request_is_an_error_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens\nx,1,1\n")
    with pytest.raises(TraceError, match="arrival_s is not a number"):
        load_trace(path)
    with pytest.raises(TraceError, match="cannot read trace"):
        load_trace(tmp_path / "missing.csv")
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TraceError, match="cannot read trace"):
        load_trace(path)


@pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason="the public Azure traces are missing")
def test_the_public_azure_traces_are_read_whole() -> None:
    code = load_trace(SHARED_TRACES / "AzureLLMInferenceTrace_code.csv")
    conversation = load_trace(SHARED_TRACES / "AzureLLMInferenceTrace_conv.csv")
    assert (len(code.requests), len(conversation.requests)) == (8819, 19366)
    assert not code.skipped
    assert not conversation.skipped
    assert code.rate_per_s == pytest.approx(2.57, abs=0.01)
    assert conversation.rate_per_s == pytest.approx(5.53, abs=0.01)
