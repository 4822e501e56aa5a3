"""Workloads: generated traces, traces in files, their transformations, and notices about them."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cli import main
from serve_app.core.routing.prefix import BLOCK_ENDS
from serve_app.lab.workloads import (
    RECIPES,
    TRACES_VARIABLE,
    Arrivals,
    GammaArrivals,
    LognormalLengths,
    MixedLengths,
    OnOffArrivals,
    QuantileLengths,
    Trace,
    TraceChoice,
    TraceError,
    TraceRequest,
    UniformLengths,
    assign_priorities,
    assign_tenants,
    describe_skipped,
    engine_blocks,
    gateway_blocks,
    load_trace,
    merge,
    pair_within_totals,
    parse_shares,
    plain_stream,
    resolve,
    scale_to_rate,
    stream,
    take,
    zipf_shares,
)
from serve_app.request import PriorityClass


def trace(*arrivals_s: float, name: str = "t") -> Trace:
    """Return requests at these times; the n-th has n prompt tokens, which identify it."""
    requests = tuple(
        TraceRequest(arrival_s=at, prompt_tokens=number, output_tokens=5)
        for number, at in enumerate(arrivals_s, start=1)
    )
    return Trace(name=name, source="made for a test", requests=requests)


def test_quantile_lengths_reproduce_their_points() -> None:
    lengths = QuantileLengths(((0, 1), (0.5, 100), (0.9, 1000), (1, 2000)))
    drawn = lengths.sample(50_000, stream(0, "lengths"))
    assert np.percentile(drawn, [50, 90]) == pytest.approx([100, 1000], rel=0.05)
    assert drawn.min() >= 1
    assert drawn.max() <= 2000


def test_lognormal_lengths_have_the_requested_mean_and_are_cut() -> None:
    drawn = LognormalLengths(mean=100, cv=0.5, max_tokens=400).sample(50_000, stream(0, "lengths"))
    assert drawn.mean() == pytest.approx(100, rel=0.03)
    assert drawn.max() <= 400


def test_mixed_lengths_have_the_shares_of_their_parts() -> None:
    mix = MixedLengths(((0.8, UniformLengths(32, 256)), (0.2, UniformLengths(1024, 4096))))
    drawn = mix.sample(50_000, stream(0, "lengths"))
    assert (drawn <= 256).mean() == pytest.approx(0.8, abs=0.01)
    assert not ((drawn > 256) & (drawn < 1024)).any()


@given(
    st.lists(st.tuples(st.integers(2, 500), st.integers(1, 500)), min_size=1, max_size=80), st.integers(0, 99)
)
def test_an_output_is_always_shorter_than_its_total(pairs: list[tuple[int, int]], seed: int) -> None:
    totals = np.array([total for total, _ in pairs])
    outputs = np.array([output for _, output in pairs])
    paired = pair_within_totals(totals, outputs, stream(seed, "lengths"))
    assert np.all(paired < totals)
    assert np.all(paired >= 1)


def test_pairing_preserves_every_output_when_all_fit() -> None:
    totals, outputs = np.array([9, 100, 50, 10]), np.array([8, 9, 40, 49])
    paired = pair_within_totals(totals, outputs, stream(3, "lengths"))
    assert sorted(paired) == sorted(outputs)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.5])
def test_gamma_gaps_have_the_requested_mean_and_variation(cv: float) -> None:
    times = GammaArrivals(rate_per_s=20, cv=cv).sample(100_000, stream(1, "arrivals"))
    gaps = np.diff(times)
    assert 1 / gaps.mean() == pytest.approx(20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_on_off_arrivals_have_the_mean_rate_and_pauses() -> None:
    times = OnOffArrivals(rate_per_s=5, on_s=10, off_s=10).sample(50_000, stream(2, "arrivals"))
    assert len(times) / times[-1] == pytest.approx(5, rel=0.1)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() > 5
    busy = gaps[gaps < 1]
    assert 1 / busy.mean() == pytest.approx(10, rel=0.1)


@given(st.integers(0, 200), st.integers(0, 1000))
def test_arrivals_ascend_whatever_the_count_and_the_seed(count: int, seed: int) -> None:
    processes: list[Arrivals] = [
        GammaArrivals(rate_per_s=3, cv=2),
        OnOffArrivals(rate_per_s=3, on_s=1, off_s=2),
    ]
    for process in processes:
        times = process.sample(count, stream(seed, "arrivals"))
        assert len(times) == count
        assert np.all(np.diff(times) >= 0)


def test_a_rate_of_zero_is_rejected_with_its_value() -> None:
    with pytest.raises(ValueError, match="rate_per_s must be positive, got 0"):
        GammaArrivals(rate_per_s=0)
    with pytest.raises(ValueError, match="off_s must be positive, got -1"):
        OnOffArrivals(rate_per_s=1, on_s=1, off_s=-1)


def test_zipf_shares_add_up_and_fall_with_the_rank() -> None:
    shares = list(zipf_shares(10).values())
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.34, abs=0.01)
    assert zipf_shares(2, 0) == {"tenant-1": 0.5, "tenant-2": 0.5}


def test_shares_are_read_by_count_by_exponent_and_by_name() -> None:
    assert parse_shares("3") == zipf_shares(3)
    assert parse_shares("3:2") == zipf_shares(3, 2)
    assert parse_shares("search=3, chat=1") == {"search": 0.75, "chat": 0.25}


@pytest.mark.parametrize("text", ["", "many", "3:x", "a=", "a=-1", "=3", "a=nan", "0", "2:-1"])
def test_shares_that_cannot_be_read_are_rejected_with_the_text(text: str) -> None:
    with pytest.raises(TraceError, match=r"shares|tenants"):
        parse_shares(text)


def test_tenants_get_about_their_share_and_nothing_else_changes() -> None:
    plain = trace(*[float(at) for at in range(4000)])
    tenanted = assign_tenants(plain, parse_shares("a=3,b=1"), stream(0, "tenants"))
    counts = Counter(request.tenant for request in tenanted.requests)
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert [one.arrival_s for one in tenanted.requests] == [one.arrival_s for one in plain.requests]


def test_priorities_are_drawn_by_share_and_unknown_classes_rejected() -> None:
    drawn = assign_priorities(trace(*[0.0] * 50), {"batch": 1.0}, stream(0, "priorities"))
    assert {request.priority for request in drawn.requests} == {"batch"}
    with pytest.raises(TraceError, match="no priority class urgent: use interactive, default, batch"):
        assign_priorities(drawn, {"urgent": 1.0}, stream(0, "priorities"))


def test_streams_are_reproducible_and_reject_a_negative_seed() -> None:
    assert plain_stream(3, "x").random() == plain_stream(3, "x").random()
    assert plain_stream(3, "x").random() != plain_stream(3, "y").random()
    with pytest.raises(ValueError, match="got -1"):
        stream(-1, "x")


# -- transformations of traces ----------------------------------------------------------------------------


def test_a_cut_starts_at_zero_and_preserves_the_gaps() -> None:
    cut = take(trace(0, 1, 3, 7, 15, 31), 3, stream(5, "window"))
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(cut.requests, cut.requests[1:], strict=False)]
    assert cut.requests[0].arrival_s == 0
    assert gaps in ([1, 2], [2, 4], [4, 8], [8, 16])
    assert "requests" in cut.source


def test_without_a_random_position_the_cut_is_the_beginning() -> None:
    assert [one.prompt_tokens for one in take(trace(0, 1, 2, 3), 2).requests] == [1, 2]
    whole = trace(0, 1)
    assert take(whole, 2) is whole


def test_a_short_trace_is_repeated_with_a_mean_gap_between_repetitions() -> None:
    repeated = take(trace(0, 1, 2), 7)
    assert [one.arrival_s for one in repeated.requests] == [0, 1, 2, 3, 4, 5, 6]
    assert [one.prompt_tokens for one in repeated.requests] == [1, 2, 3, 1, 2, 3, 1]
    assert "repeated to 7 requests" in repeated.source
    assert [one.arrival_s for one in take(trace(0), 3).requests] == [0, 1, 2]


def test_merging_orders_by_arrival_and_names_the_parts() -> None:
    merged = merge([trace(0, 4, name="a"), trace(1, 4, name="b")], name="both")
    assert [(one.arrival_s, one.prompt_tokens) for one in merged.requests] == [(0, 1), (1, 1), (4, 2), (4, 2)]
    assert merged.source.startswith("merged: ")


def test_scaling_changes_the_mean_rate_and_preserves_the_pattern() -> None:
    scaled = scale_to_rate(trace(0, 1, 4), 3.0)
    assert scaled.rate_per_s == pytest.approx(3.0)
    assert [one.arrival_s for one in scaled.requests] == pytest.approx([0, 1 / 6, 4 / 6])


def test_impossible_changes_are_rejected_with_the_value() -> None:
    with pytest.raises(TraceError, match="rate must be positive, got 0"):
        scale_to_rate(trace(0, 1), 0)
    with pytest.raises(TraceError, match="all 2 requests of 't' arrive at once"):
        scale_to_rate(trace(1, 1), 5)
    with pytest.raises(TraceError, match="at least one request, got 0"):
        take(trace(0), 0)
    with pytest.raises(TraceError, match="has no request"):
        Trace(name="none", source="nowhere", requests=())


# -- traces in files --------------------------------------------------------------------------------------

SHARED_TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


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


# -- notices of commands that replay a published trace with generated lengths -----------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.9799600,{100 + second},10\n" for second in range(0, 60, 2)
)


def lengths(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    prompts = np.array([request.prompt_tokens for request in trace.requests])
    return prompts, np.array([request.output_tokens for request in trace.requests])


def test_azure_names_read_the_file_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "AzureLLMInferenceTrace_code.csv").write_text(AZURE)
    trace = resolve(TraceChoice(name="azure-code", folder=tmp_path), 0)
    assert len(trace.requests) == 30
    assert trace.source.startswith("file ")


def test_the_folder_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(AZURE)
    monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path))
    assert len(resolve(TraceChoice(name="azure-conv"), 0).requests) == 30


@pytest.mark.usefixtures("no_trace_files")
def test_azure_names_are_generated_with_a_notice_if_there_is_no_file() -> None:
    trace = resolve(TraceChoice(name="azure-conv", requests=20_000), 0)
    assert trace.source.startswith("generated from percentiles of the Azure 2023 conversation trace")
    prompts, outputs = lengths(trace)
    assert np.percentile(prompts, [50, 90, 95]) == pytest.approx([1020, 2734, 4083], rel=0.05)
    assert prompts.mean() == pytest.approx(1155, rel=0.05)
    assert outputs.mean() == pytest.approx(211, rel=0.08)
    assert trace.rate_per_s == pytest.approx(5.53, rel=0.05)


def test_a_folder_that_was_given_must_have_the_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="run scripts/fetch_traces --out"):
        resolve(TraceChoice(name="azure-code", folder=tmp_path), 0)


def test_lmsys_follows_both_published_distributions() -> None:
    prompts, outputs = lengths(resolve(TraceChoice(name="lmsys", requests=20_000), 0))
    for tokens, share in ((128, 0.2359), (512, 0.6383), (2048, 0.9483), (8192, 0.9965)):
        assert (prompts + outputs <= tokens).mean() == pytest.approx(share, abs=0.015)
    assert np.percentile(outputs, [50, 80, 95]) == pytest.approx([140, 325, 447], rel=0.06)
    assert outputs.mean() == pytest.approx(177, rel=0.08)


def test_paper_mix_is_four_fifths_short() -> None:
    prompts, outputs = lengths(resolve(TraceChoice(name="paper-mix", requests=20_000), 0))
    assert ((prompts >= 32) & (prompts <= 256)).mean() == pytest.approx(0.8, abs=0.01)
    assert ((prompts >= 1024) & (prompts <= 4096)).mean() == pytest.approx(0.2, abs=0.01)
    assert outputs.mean() == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.usefixtures("no_trace_files")
def test_one_seed_gives_one_workload_and_seeds_differ(name: str) -> None:
    once, again, other = (resolve(TraceChoice(name=name, requests=50), seed) for seed in (1, 1, 2))
    assert once == again
    assert once.requests != other.requests


@pytest.mark.usefixtures("no_trace_files")
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_generator_has_its_mean_rate(name: str) -> None:
    trace = resolve(TraceChoice(name=name, requests=5_000), 3)
    assert len(trace.requests) == 5_000
    assert trace.rate_per_s == pytest.approx(RECIPES[name].rate_per_s, rel=0.35)


def test_a_file_is_cut_at_a_position_of_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(AZURE)
    cuts = [resolve(TraceChoice(name=str(path), requests=5), seed) for seed in range(5)]
    assert {len(cut.requests) for cut in cuts} == {5}
    assert len({cut.requests[0].prompt_tokens for cut in cuts}) > 1


def test_tenants_and_priorities_are_drawn_on_demand() -> None:
    trace = resolve(TraceChoice(name="lmsys", requests=200, tenants="a=1,b=1", priorities="batch=1"), 0)
    assert {request.tenant for request in trace.requests} == {"a", "b"}
    assert {request.priority for request in trace.requests} == {"batch"}
    plain = resolve(TraceChoice(name="lmsys", requests=200), 0)
    assert [one.prompt_tokens for one in plain.requests] == [one.prompt_tokens for one in trace.requests]


def test_merged_generators_cover_an_hour() -> None:
    trace = resolve(TraceChoice(name="lmsys+paper-mix"), 0)
    assert trace.span_s == pytest.approx(3_600, rel=0.05)
    assert len(trace.requests) == 36_000 + 72_000


def test_merged_traces_have_the_requested_size() -> None:
    trace = resolve(TraceChoice(name="lmsys+paper-mix", requests=300), 0)
    assert len(trace.requests) == 300


def test_a_name_that_is_neither_a_file_nor_known_is_rejected_with_the_names() -> None:
    with pytest.raises(
        TraceError, match="no trace 'azur': use a file, or one of azure-code, azure-conv, lmsys"
    ):
        resolve(TraceChoice(name="azur"), 0)


def test_numbers_out_of_range_are_rejected() -> None:
    with pytest.raises(TraceError, match="requests must be positive, got 0"):
        resolve(TraceChoice(name="lmsys", requests=0), 0)
    with pytest.raises(TraceError, match="seed must not be negative, got -3"):
        resolve(TraceChoice(name="lmsys"), -3)


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


# -- blocks of prompts ------------------------------------------------------------------------------------


def common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1),
        min(len(one), len(other)),
    )


def test_an_engine_has_several_blocks_per_id() -> None:
    blocks = list(engine_blocks((7, 9), 64, 128, 16))
    assert blocks == [28, 29, 30, 31, 36, 37, 38, 39]


def test_an_engine_has_only_full_blocks_and_only_those_of_known_ids() -> None:
    assert list(engine_blocks((7, 9), 64, 64 + 31, 16)) == [28, 29, 30, 31, 36]
    assert list(engine_blocks((7, 9), 64, 1_000, 16)) == [28, 29, 30, 31, 36, 37, 38, 39]
    assert list(engine_blocks((), 64, 1_000, 16)) == []
    assert list(engine_blocks((7,), 64, 15, 16)) == []


def test_engine_blocks_of_the_same_size_are_the_ids() -> None:
    assert list(engine_blocks((7, 9, 11), 16, 40, 16)) == [7, 9]


def test_equal_ids_give_equal_engine_blocks_up_to_the_first_difference() -> None:
    one, other = (list(engine_blocks(ids, 64, 250, 16)) for ids in ((1, 2, 3), (1, 2, 4)))
    assert common(one, other) == 8
    assert len(set(one) | set(other)) == 8 + 4 + 4


def test_a_gateway_has_the_blocks_that_end_within_known_ids() -> None:
    # 32 blocks of 128 tokens, then larger ones.
    ids = tuple(range(100))
    assert len(list(gateway_blocks(ids, 64, 6_400))) == sum(end <= 6_400 for end in BLOCK_ENDS)
    assert len(list(gateway_blocks(ids, 64, 1_000))) == 1_000 // 128
    assert len(list(gateway_blocks(ids[:5], 64, 1_000))) == 2
    assert list(gateway_blocks(ids, 64, 127)) == []


@pytest.mark.parametrize("shared", [0, 1, 2, 10, 63, 64, 80])
def test_gateway_blocks_are_equal_up_to_the_last_one_within_equal_ids(shared: int) -> None:
    ids = tuple(range(100))
    other = ids[:shared] + tuple(range(1_000, 1_100 - shared))
    blocks, others = (list(gateway_blocks(each, 64, 6_400)) for each in (ids, other))
    assert common(blocks, others) == sum(end <= 64 * shared for end in BLOCK_ENDS)
    assert len(set(blocks)) == len(blocks)
