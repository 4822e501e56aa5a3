"""Agent programs of the experiment `agents`: their file, their blocks, and generated ones."""

import gzip
import json
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from experiments.agents.programs import (
    BLOCK_TOKENS,
    Program,
    Turn,
    generate_programs,
    load_programs,
    shuffled,
    with_gaps_up_to,
    within,
)
from serve_app.request import TurnEnd
from tests.experiments.agents import chain, turn


def rows_of(program: Program) -> list[dict[str, Any]]:
    """Return the lines of a file with this program."""
    stops = {TurnEnd.TOOLS: "tool_use", TurnEnd.DONE: "end_turn", None: None}
    return [
        {
            "program": program.name,
            "session": f"{program.name}/{one.session}",
            "row": row,
            "after": list(one.after),
            "gap_net_s": one.gap_s or None,
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "blocks": [one.source, one.known, one.new],
            "stop": stops[one.ending],
        }
        for row, one in enumerate(program.turns)
    ]


def test_a_file_is_read_in_the_order_of_its_lines(tmp_path: Path) -> None:
    made = [*generate_programs(20, 3), chain(3)]
    assert any(one.session for program in made for one in program.turns)
    path = tmp_path / "programs.jsonl.gz"
    lines = [json.dumps(row) + "\n" for program in made for row in rows_of(program)]
    path.write_bytes(gzip.compress("".join(lines).encode()))
    assert load_programs(path) == made


# Block ids


def test_the_ids_of_a_program_start_at_its_number() -> None:
    program = chain(2)
    ours, theirs = ({one for ids in program.block_ids(number) for one in ids} for number in (1, 2))
    assert min(ours) == 1 << 32
    assert min(theirs) == 2 << 32
    assert not ours & theirs


BLOCKS: dict[str, tuple[list[Turn], list[tuple[int, ...]]]] = {
    "references are chained": (
        [
            turn(200),  # 3 blocks: 0, 1, 2
            turn(330, after=(0,), known=2),  # Row 0 up to 1, and 3, 4, 5.
            turn(400, after=(1,), source=1, known=4),  # Row 1 up to 4, and 6, 7.
            turn(130, after=(2,), source=2, known=1),  # Row 0's first block, and 8.
        ],
        [(0, 1, 2), (0, 1, 3, 4, 5), (0, 1, 3, 4, 6, 7), (0, 8)],
    ),
    # The first turn ends at 200 + 130 = 330 tokens: 5 whole blocks.
    "an answer has blocks of the next prompt": (
        [turn(200, 130), turn(470, after=(0,), known=3)],
        [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5, 6)],
    ),
    "an answer is longer than the next prompt": (
        [turn(200, 5_000), turn(300, after=(0,), known=3)],
        [(0, 1, 2, 3), (0, 1, 2, 3)],
    ),
    "the first prompt behind it continues an answer": (
        [turn(192, 128), turn(320, after=(0,), known=3), turn(384, after=(0,), known=3, session=1)],
        [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (0, 1, 2, 5, 6, 7)],
    ),
    "a prompt without the whole prompt before it has not its answer": (
        [turn(200, 130), turn(470, after=(0,), known=2)],
        [(0, 1, 2), (0, 1, 3, 4, 5, 6, 7)],
    ),
}


@pytest.mark.parametrize(("turns", "ids"), BLOCKS.values(), ids=BLOCKS)
def test_block_ids_follow_the_references(turns: list[Turn], ids: list[tuple[int, ...]]) -> None:
    assert Program("p", tuple(turns)).block_ids(0) == ids


def test_generated_turns_start_with_the_known_ids_of_their_source() -> None:
    for program in generate_programs(6, 1):
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


def test_programs_beyond_the_limit_are_dropped() -> None:
    small, large = Program("s", (turn(100, 28),)), Program("l", (turn(100), turn(100, 29, after=(0,))))
    assert within([small, large, large], 128) == [small]
    assert within([small, large], 129) == [small, large]


def test_the_order_is_drawn_by_seed() -> None:
    made = [Program(f"p{number}", (turn(64),)) for number in range(20)]
    order = shuffled(made, 1)
    assert order != made
    assert sorted(one.name for one in order) == sorted(one.name for one in made)
    assert order == shuffled(made, 1)
    assert order != shuffled(made, 2)
    assert shuffled(made, 1, 5) == order[:5]
    assert shuffled(made, 1, 45) == order * 2 + order[:5]


def test_long_gaps_are_cut_and_short_ones_stay() -> None:
    made = Program("p", (turn(64), turn(64, after=(0,), gap_s=90.0), turn(64, after=(1,), gap_s=3.0)))
    (cut,) = with_gaps_up_to([made], 60.0)
    assert [one.gap_s for one in cut.turns] == [0.0, 60.0, 3.0]
    assert [one.prompt_tokens for one in cut.turns] == [64, 64, 64]


# Generated programs


def test_generated_programs_follow_from_their_seed() -> None:
    assert generate_programs(4, 7) == generate_programs(4, 7)
    assert generate_programs(4, 7) != generate_programs(4, 8)
    assert generate_programs(8, 7)[:4] == generate_programs(4, 7)


def test_generated_programs_have_the_medians_of_recorded_ones() -> None:
    made = generate_programs(300, 1)
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
    for program in generate_programs(60, 4):
        for row, one in enumerate(program.turns):
            assert all(0 <= before < row for before in one.after)
            if one.session and program.turns[one.after[0]].session != one.session:
                assert program.parent(one.session) == program.turns[one.after[0]].session == 0
            if len(one.after) > 1:
                joins += 1
                assert {program.turns[before].session for before in one.after[1:]} & {0} == set()
    assert joins
