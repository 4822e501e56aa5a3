from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from serve_app.lab.workloads.programs import (
    BLOCK_TOKENS,
    Program,
    Programs,
    generate_programs,
    load_programs,
)
from serve_app.lab.workloads.trace import TraceError
from serve_app.request import TurnEnd
from tests.lab.workloads.builders import chain, programs, rows_of, turn, turn_row, write_rows

RECORDED = Path(__file__).resolve().parents[4] / "shared" / "traces" / "coding_agents.jsonl.gz"

Row = dict[str, Any]


def read(folder: Path, *rows: Row | str) -> Programs:
    return load_programs(write_rows(folder / "programs.jsonl", *rows))


def without(row: Row, field: str) -> Row:
    return {name: value for name, value in row.items() if name != field}


# The file

FIRST = turn_row(0, 200, (0, 0, 3))
SECOND = turn_row(1, 400, (0, 3, 3))


def test_turns_are_read_in_the_order_of_their_rows(tmp_path: Path) -> None:
    loaded = read(tmp_path, FIRST, SECOND)
    assert loaded.name == "programs.jsonl"
    assert loaded.source == f"file {tmp_path / 'programs.jsonl'}"
    (program,) = loaded.programs
    assert program.name == "p"
    assert program.turns == (turn(200), turn(400, after=(0,), gap_s=2.0, known=3))


def test_lines_of_programs_may_alternate_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    loaded = read(tmp_path, FIRST, "", FIRST | {"program": "q"}, SECOND, SECOND | {"program": "q"})
    assert [(one.name, len(one.turns)) for one in loaded.programs] == [("p", 2), ("q", 2)]


def test_a_gzip_file_is_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "programs.jsonl.gz", FIRST, SECOND)
    assert load_programs(path).programs == read(tmp_path, FIRST, SECOND).programs


def test_the_gap_without_overheads_takes_precedence(tmp_path: Path) -> None:
    (program,) = read(tmp_path, FIRST, SECOND | {"gap_net_s": 0.5}).programs
    assert [one.gap_s for one in program.turns] == [0.0, 0.5]


def test_an_answer_has_at_least_one_token(tmp_path: Path) -> None:
    (program,) = read(tmp_path, FIRST | {"output_tokens": 0}).programs
    assert program.turns[0].output_tokens == 1


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"stop": "tool_use"}, TurnEnd.TOOLS),
        ({"stop": "end_turn"}, TurnEnd.DONE),
        ({"stop": "max_tokens"}, None),
        ({"stop": None}, None),
        ({}, None),
    ],
)
def test_the_ending_of_an_answer_is_optional(tmp_path: Path, stop: Row, expected: TurnEnd | None) -> None:
    (program,) = read(tmp_path, FIRST | stop).programs
    assert program.turns[0].ending is expected


@pytest.mark.parametrize(
    ("root", "agent"),
    [
        ({}, {}),
        ({"depth": 0}, {"depth": 0}),
        ({"session": "a", "depth": 0}, {"session": "a", "depth": 1}),
    ],
)
def test_turns_of_one_session_are_one_conversation(tmp_path: Path, root: Row, agent: Row) -> None:
    (program,) = read(tmp_path, FIRST | root, SECOND | agent).programs
    assert [one.session for one in program.turns] == [0, 0]
    assert program.parent(0) is None


@pytest.mark.parametrize(
    ("root", "agent"), [({"depth": 0}, {"depth": 1}), ({"session": "a"}, {"session": "b"})]
)
def test_a_sub_agent_is_another_conversation_below_its_launcher(
    tmp_path: Path, root: Row, agent: Row
) -> None:
    (program,) = read(tmp_path, FIRST | root, SECOND | agent).programs
    assert [one.session for one in program.turns] == [0, 1]
    assert program.parent(1) == 0


def test_sessions_of_different_programs_are_numbered_separately(tmp_path: Path) -> None:
    same = {"session": "one id for all"}
    loaded = read(tmp_path, FIRST | same, FIRST | same | {"program": "q"})
    assert [one.turns[0].session for one in loaded.programs] == [0, 0]


# Files that are refused

FAULTS: dict[str, tuple[Row | str, str]] = {
    "not JSON": ("{", "Expecting property name"),
    "not an object": ("[1, 2]", "list indices"),
    "no program": (without(SECOND, "program"), "it has no 'program'"),
    "no row": (without(SECOND, "row"), "it has no 'row'"),
    "no after": (without(SECOND, "after"), "it has no 'after'"),
    "no gap": (without(SECOND, "gap_s"), "it has no 'gap_s'"),
    "no prompt_tokens": (without(SECOND, "prompt_tokens"), "it has no 'prompt_tokens'"),
    "no output_tokens": (without(SECOND, "output_tokens"), "it has no 'output_tokens'"),
    "no blocks": (without(SECOND, "blocks"), "it has no 'blocks'"),
    "a row is missing": (SECOND | {"row": 2}, "row 1 of its program is expected here, got 2"),
    "a row occurs twice": (FIRST, "row 1 of its program is expected here, got 0"),
    "after itself": (
        SECOND | {"after": [1]},
        r"after must name earlier rows, got \[1\] in row 1",
    ),
    "after a later row": (SECOND | {"after": [0, 7]}, r"after must name earlier rows, got \[0, 7\]"),
    "after a negative row": (SECOND | {"after": [-1]}, "after must name earlier rows"),
    "blocks of a later row": (SECOND | {"blocks": [1, 3, 3]}, "blocks must refer to an earlier row, got 1"),
    "more known blocks than there are": (SECOND | {"blocks": [0, 4, 2]}, "row 0 has fewer than 4 blocks"),
    "too many blocks": (
        SECOND | {"blocks": [0, 3, 4]},
        "a prompt of 400 tokens has 6 blocks of 64 tokens, got 3 known and 4 new ones",
    ),
    "too few blocks": (SECOND | {"blocks": [0, 3, 2]}, "got 3 known and 2 new ones"),
    "negative known blocks": (SECOND | {"blocks": [0, -1, 7]}, "must not be negative"),
    "negative new blocks": (SECOND | {"prompt_tokens": 130, "blocks": [0, 3, -1]}, "must not be negative"),
    "two numbers for blocks": (SECOND | {"blocks": [0, 3]}, "not enough values"),
    "a negative gap": (SECOND | {"gap_s": -1.0}, "must not be negative"),
    "a gap without end": (SECOND | {"gap_s": float("inf")}, "must be finite"),
    "a gap that is no number": (SECOND | {"gap_s": float("nan")}, "must be finite"),
    "a gap in words": (SECOND | {"gap_s": "soon"}, "could not convert"),
    "an empty prompt": (SECOND | {"prompt_tokens": 0, "blocks": [0, 0, 0]}, "at least one token"),
    "an endless prompt": (SECOND | {"prompt_tokens": float("inf")}, "cannot convert float infinity"),
    "no number of tokens": (SECOND | {"output_tokens": None}, "NoneType"),
    "a list as session": (SECOND | {"session": []}, "unhashable"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_line_is_refused_with_its_file_number_and_reason(tmp_path: Path, fault: str) -> None:
    line, reason = FAULTS[fault]
    with pytest.raises(TraceError, match=rf"programs\.jsonl, line 2 is not a turn of a program: .*{reason}"):
        read(tmp_path, FIRST, line)


def test_a_source_is_ignored_where_no_blocks_are_known(tmp_path: Path) -> None:
    (program,) = read(tmp_path, FIRST | {"blocks": [9, 0, 3]}).programs
    assert program.block_ids(0) == [(0, 1, 2)]


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.jsonl.gz", "folder", "folder.gz"])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, name: str) -> None:
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    with pytest.raises(TraceError, match=f"cannot read programs from .*{name}"):
        load_programs(tmp_path / name)


def broken(change: Callable[[bytearray], bytearray], path: Path) -> Path:
    path.write_bytes(change(bytearray(path.read_bytes())))
    return path


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "programs.jsonl.gz"

    def flipped(content: bytearray) -> bytearray:
        content[10] = 0xFF
        return content

    for change in (lambda content: content[:-20], flipped, lambda _: bytearray(b"plain text")):
        write_rows(path, FIRST, SECOND)
        with pytest.raises(TraceError, match=r"cannot read programs from .*programs\.jsonl\.gz"):
            load_programs(broken(change, path))


def test_a_file_of_other_bytes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "programs.jsonl"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TraceError, match=r"cannot read programs from .*programs\.jsonl"):
        load_programs(path)


@pytest.mark.parametrize("lines", [(), ("", "   ")])
def test_an_empty_file_has_no_program_to_play(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(TraceError, match=r"programs\.jsonl.* has no program to play"):
        read(tmp_path, *lines)


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded programs are missing")
def test_the_recorded_programs_are_read_whole() -> None:
    loaded = load_programs(RECORDED)
    turns = [one for program in loaded.programs for one in program.turns]
    assert (len(loaded.programs), len(turns), loaded.dropped) == (292, 21_203, 0)
    assert sum(one.ending is None for one in turns) == 1_257
    assert all(not one.after for one in (program.turns[0] for program in loaded.programs))


# Block ids


def test_the_ids_of_a_program_start_at_its_number() -> None:
    program = chain(2)
    ours, theirs = ({one for ids in program.block_ids(number) for one in ids} for number in (1, 2))
    assert min(ours) == 1 << 32
    assert min(theirs) == 2 << 32
    assert not ours & theirs


def test_ids_are_rebuilt_along_chained_references() -> None:
    program = Program(
        "p",
        (
            turn(200),  # 3 blocks: 0, 1, 2
            turn(330, after=(0,), known=2),  # Row 0 up to 1, and 3, 4, 5.
            turn(400, after=(1,), source=1, known=4),  # Row 1 up to 4, and 6, 7.
            turn(130, after=(2,), source=2, known=1),  # Row 0's first block, and 8.
        ),
    )
    assert program.block_ids(0) == [(0, 1, 2), (0, 1, 3, 4, 5), (0, 1, 3, 4, 6, 7), (0, 8)]


def test_the_blocks_of_an_answer_are_those_of_the_next_prompt() -> None:
    # The first turn ends at 200 + 130 = 330 tokens: 5 whole blocks. The next prompt has 7.
    program = Program("p", (turn(200, 130), turn(470, after=(0,), known=3)))
    first, second = program.block_ids(0)
    assert second == (0, 1, 2, 3, 4, 5, 6)
    assert first == second[:5]


def test_an_answer_longer_than_the_next_prompt_has_the_blocks_of_that_prompt() -> None:
    program = Program("p", (turn(200, 5_000), turn(300, after=(0,), known=3)))
    assert program.block_ids(0) == [(0, 1, 2, 3), (0, 1, 2, 3)]


def test_an_answer_is_continued_by_the_first_prompt_behind_it() -> None:
    program = Program(
        "p", (turn(192, 128), turn(320, after=(0,), known=3), turn(384, after=(0,), known=3, session=1))
    )
    assert program.block_ids(0) == [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (0, 1, 2, 5, 6, 7)]


def test_a_prompt_without_the_whole_prompt_before_it_has_not_its_answer() -> None:
    program = Program("p", (turn(200, 130), turn(470, after=(0,), known=2)))
    assert program.block_ids(0)[0] == (0, 1, 2)


def test_generated_turns_start_with_the_known_ids_of_their_source() -> None:
    for program in generate_programs(6, 1).programs:
        ids = program.block_ids(3)
        seen: set[int] = set()
        for one, blocks in zip(program.turns, ids, strict=True):
            prompt = blocks[: one.prompt_tokens // BLOCK_TOKENS]
            assert len(prompt) == one.known + one.new
            assert prompt[: one.known] == ids[one.source][: one.known]
            new = prompt[one.known :]
            assert len(set(prompt)) == len(prompt)
            # Only the answer of the turn before may have a block of its own in advance.
            known = set(ids[one.source]) if one.known else set()
            assert not set(new) & seen - known
            seen.update(blocks)
            assert len(blocks) <= (one.prompt_tokens + one.output_tokens) // BLOCK_TOKENS


# Ideal prefills


def test_the_ideal_prefill_is_what_no_turn_before_has_computed() -> None:
    program = Program(
        "p",
        (
            turn(200, 130),  # All 200 tokens; with the answer, 5 blocks are cached.
            turn(470, after=(0,), known=3),  # 5 of its 7 blocks.
            turn(448, after=(1,), source=1, known=7),  # All blocks; the last one has the last token.
            turn(130, 10, after=(1,), session=1),  # None.
            turn(200, 10, after=(3,), source=3, known=2, session=1),  # 2 of 3.
        ),
    )
    assert program.ideal_prefills() == [200, 470 - 5 * 64, 64, 130, 200 - 2 * 64]


# Operations


def test_programs_beyond_the_limit_are_dropped_and_counted() -> None:
    small, large = Program("s", (turn(100, 28),)), Program("l", (turn(100), turn(100, 29, after=(0,))))
    kept = programs(small, large, large).within(128)
    assert (kept.programs, kept.dropped) == ((small,), 2)
    assert kept.within(1_000) == kept
    with pytest.raises(TraceError, match="has no program to play; 3 exceed the limit on tokens"):
        kept.within(127)


def test_the_order_is_drawn_by_seed() -> None:
    made = programs(*(Program(f"p{number}", (turn(64),)) for number in range(20)))
    shuffled = made.shuffled(1, None)
    assert shuffled.programs != made.programs
    assert sorted(one.name for one in shuffled.programs) == sorted(one.name for one in made.programs)
    assert shuffled == made.shuffled(1, None)
    assert shuffled != made.shuffled(2, None)
    assert made.shuffled(1, 5).programs == shuffled.programs[:5]
    assert made.shuffled(1, 45).programs == shuffled.programs * 2 + shuffled.programs[:5]


def test_no_programs_are_none_to_play() -> None:
    with pytest.raises(TraceError, match="has no program to play"):
        programs(chain(1)).shuffled(0, 0)


def test_long_gaps_are_cut_and_short_ones_stay() -> None:
    made = programs(
        Program("p", (turn(64), turn(64, after=(0,), gap_s=90.0), turn(64, after=(1,), gap_s=3.0)))
    )
    cut = made.with_gaps_up_to(60.0)
    assert [one.gap_s for one in cut.programs[0].turns] == [0.0, 60.0, 3.0]
    assert cut.source == "made for a test, gaps cut at 60 s"
    assert [one.prompt_tokens for one in cut.programs[0].turns] == [64, 64, 64]


# Generated programs


def test_generated_programs_follow_from_their_seed() -> None:
    assert generate_programs(4, 7) == generate_programs(4, 7)
    assert generate_programs(4, 7).programs != generate_programs(4, 8).programs
    assert generate_programs(8, 7).programs[:4] == generate_programs(4, 7).programs


def test_generated_programs_are_a_valid_file(tmp_path: Path) -> None:
    made = generate_programs(20, 3)
    assert any(one.session for program in made.programs for one in program.turns)
    loaded = read(tmp_path, *(row for program in made.programs for row in rows_of(program)))
    assert loaded.programs == made.programs


def test_generated_programs_have_the_medians_of_recorded_ones() -> None:
    made = generate_programs(300, 1).programs
    roots = [[one for one in program.turns if not one.session] for program in made]
    turns = [one for program in made for one in program.turns]
    # Half of the programs are below each median; three standard deviations of that share are 0.09.
    assert sum(len(root) < 50 for root in roots) / 300 == pytest.approx(0.5, abs=0.09)
    assert sum(root[0].prompt_tokens < 23_305 for root in roots) / 300 == pytest.approx(0.5, abs=0.09)
    assert median(one.output_tokens for one in turns) == pytest.approx(213, rel=0.05)
    assert sum(one.ending is TurnEnd.DONE for one in turns) / len(turns) == pytest.approx(0.06, abs=0.01)
    after_tools = [
        one.gap_s
        for program in made
        for one in islice(program.turns, 1, None)
        if program.turns[one.after[0]].ending is TurnEnd.TOOLS
    ]
    assert median(after_tools) == pytest.approx(1.1, rel=0.1)


def test_sub_agents_follow_their_launcher_and_are_joined() -> None:
    joins = 0
    for program in generate_programs(60, 4).programs:
        for row, one in enumerate(program.turns):
            assert all(0 <= before < row for before in one.after)
            if one.session and program.turns[one.after[0]].session != one.session:
                assert program.parent(one.session) == program.turns[one.after[0]].session == 0
            if len(one.after) > 1:
                joins += 1
                assert {program.turns[before].session for before in one.after[1:]} & {0} == set()
    assert joins
