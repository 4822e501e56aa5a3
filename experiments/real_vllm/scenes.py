"""Scenes: the requests of a run, drawn from a seed. Lengths and arrivals are the same for every system."""

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.common.load_test.open_loop import WORDS
from experiments.real_vllm.client import Ask, Plan
from serve_app.core.settings_base import settings
from serve_app.lab.workloads import find_file, stream

BATCH = "batch"
LIMITS_S: Mapping[str, float] = {"short": 1.0, "light": 1.0, "long": 4.0, "heavy": 4.0}
"""Limits of the first token by kind, for goodput."""
AGENTS_FILE = "mlcommons_agentic_coding.jsonl.gz"

_SHORT_TOKENS, _LONG_TOKENS = (64, 256), (2_000, 6_000)
_OUTPUT_TOKENS = {"short": 64, "light": 64, "long": 128, "heavy": 128}
_LONG_SHARE = 0.2
_FLOOD, _FLOOD_TOKENS, _LATE_S = 100, 1_000, 0.5
_FLOOD_TENANTS = 5
_CONVERSATIONS, _TURNS, _FIRST_TOKENS, _TURN_TOKENS = 8, 6, 1_000, 200
_AGENTS, _AGENT_BYTES, _BYTES_PER_TOKEN = 12, 42_000, 4
_LIGHT_TENANTS = 26
_BATCHES, _BATCH_OUTPUT_TOKENS = 32, 512
FLOORS: Mapping[str, float] = {"large": 8_000.0, "small": 1_500.0, "idle": 4_000.0}
"""Floors of three tenants, in tokens of service per second; two servers serve about 17,500."""
# Connections and seconds between their requests, of each tenant and of a flood of several without a floor.
_LANES: Mapping[str, tuple[int, float]] = {
    "large": (40, 0.0),
    "small": (8, 0.0),
    "idle": (1, 1.0),
    "flood": (80, 0.0),
}


@settings
class SceneSettings:
    """Settings of a scene.

    Attributes:
        loads: arrival rates, as shares of the servers' capacity.
        seeds: each system plays all of them; another system is the first one for each.
        warm_up_s: before the measurement.
        seconds: of the measurement.
    """

    loads: tuple[float, ...] = (0.5,)
    seeds: tuple[int, ...] = (1, 2, 3)
    warm_up_s: float = 8.0
    seconds: float = 25.0

    @property
    def window(self) -> tuple[float, float]:
        """Start and end of the measurement."""
        return self.warm_up_s, self.warm_up_s + self.seconds


@dataclass(frozen=True, slots=True)
class Drawing:
    """Random numbers of a run, and its texts, which no other run has.

    Attributes:
        salt: name of the run.
    """

    seed: int
    salt: str

    def rng(self, use: str) -> np.random.Generator:
        """Return the numbers of one use."""
        return stream(self.seed, use)

    def messages(self, number: int, tokens: int) -> list[dict[str, str]]:
        """Return a prompt of about so many tokens."""
        return [_message("user", self.text(number, tokens))]

    def text(self, number: int, tokens: int) -> str:
        """Return random words, one per token."""
        rng = stream(zlib.crc32(f"{self.salt} {number}".encode()), "texts")
        return " ".join(rng.choice(np.array(WORDS), tokens).tolist())


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def mix(scene: SceneSettings, rate_per_s: float, drawing: Drawing) -> Plan:
    """Return short and long requests of Poisson arrivals."""
    asks = _poisson(scene, rate_per_s, drawing, lambda rng: "long" if rng.random() < _LONG_SHARE else "short")
    return Plan(kinds=("short", "long"), window=scene.window, asks=asks)


def late_user(scene: SceneSettings, _rate: float, drawing: Drawing) -> Plan:
    """Return many requests of user A at once, and one of user B a moment later."""
    users = [("A", 0.0)] * _FLOOD + [("B", _LATE_S)]
    asks = [
        Ask(
            kind=user,
            messages=drawing.messages(number, _FLOOD_TOKENS),
            output_tokens=_OUTPUT_TOKENS["short"],
            at_s=at_s,
            tenant=user,
        )
        for number, (user, at_s) in enumerate(users)
    ]
    return Plan(kinds=("A", "B"), window=(0.0, scene.seconds), asks=asks)


def conversations(scene: SceneSettings, _rate: float, drawing: Drawing) -> Plan:
    """Return conversations whose prompts repeat everything said before."""
    pauses = drawing.rng("pauses")
    dialogues = []
    for number in range(_CONVERSATIONS):
        said: list[dict[str, str]] = []
        turns = []
        for turn in range(_TURNS):
            if turn:
                answer = drawing.text(1_000 + number * _TURNS + turn, _OUTPUT_TOKENS["short"])
                said = [*said, _message("assistant", answer)]
            said = [
                *said,
                *drawing.messages(number * _TURNS + turn, _TURN_TOKENS if turn else _FIRST_TOKENS),
            ]
            turns.append(
                Ask(
                    kind="later" if turn else "first",
                    messages=said,
                    output_tokens=_OUTPUT_TOKENS["short"],
                    at_s=float(pauses.uniform(1.0, 3.0)),
                )
            )
        dialogues.append(turns)
    return Plan(kinds=("first", "later"), window=(0.0, scene.seconds), dialogues=dialogues)


def agents(scene: SceneSettings, _rate: float, drawing: Drawing) -> Plan:
    """Return recorded conversations of coding agents, with the recorded answers in their history."""
    recorded = list(_recorded(drawing.salt))
    drawing.rng("order").shuffle(recorded)
    lanes = [list(itertools.chain(*recorded[lane::_AGENTS])) for lane in range(_AGENTS)]
    return Plan(kinds=("turn",), window=scene.window, dialogues=lanes)


def _recorded(salt: str) -> Iterator[list[Ask]]:
    """Yield the turns of each recorded conversation whose prompts fit."""
    file = find_file(AGENTS_FILE)
    assert file is not None, "a play leaves out what is missing"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = list(map(json.loads, lines))
    for name, group in itertools.groupby(rows, key=lambda row: row["conversation_id"]):
        said: list[dict[str, str]] = []
        turns: list[Ask] = []
        pause_s = 0.0
        for row in group:
            if row["role"] == "user":
                said = [_message("system", f"{salt} {name} {row['system']} {json.dumps(row['tools'])}")]
                said.append(_message("user", row["content"]))
            elif row["role"] == "tool":
                said = [*said, _message("user", json.dumps(row["tool_results"]))]
                pause_s = row["delay_seconds"]
            else:
                answer = f"{row['reasoning_content']} {json.dumps(row['tool_calls'])}"
                if sum(len(one["content"]) for one in said) + len(answer) > _AGENT_BYTES:
                    break
                tokens = max(1, len(answer) // _BYTES_PER_TOKEN)
                turns.append(Ask(kind="turn", messages=said, output_tokens=tokens, at_s=pause_s))
                said = [*said, _message("assistant", answer)]
        yield turns


def tenants(scene: SceneSettings, rate_per_s: float, drawing: Drawing) -> Plan:
    """Return a heavy tenant with half of the requests, all long, and many light ones."""
    asks = _poisson(scene, rate_per_s, drawing, lambda rng: "heavy" if rng.random() < 0.5 else "light")
    return Plan(kinds=("light", "heavy"), window=scene.window, asks=asks)


def batch(scene: SceneSettings, rate_per_s: float, drawing: Drawing) -> Plan:
    """Return the mix beside many connections that request long outputs in the batch class."""
    lengths, numbers = drawing.rng("batch"), itertools.count(1_000_000)
    per_lane = 1 + int(scene.window[1])
    dialogues = [
        [
            Ask(
                kind=BATCH,
                messages=drawing.messages(next(numbers), int(lengths.integers(*_SHORT_TOKENS))),
                output_tokens=_BATCH_OUTPUT_TOKENS,
                priority=BATCH,
                tenant=BATCH,
            )
            for _ in range(per_lane)
        ]
        for _ in range(_BATCHES)
    ]
    asks = mix(scene, rate_per_s, drawing).asks
    return Plan(kinds=("short", "long", BATCH), window=scene.window, asks=asks, dialogues=dialogues)


def floors(scene: SceneSettings, _rate: float, drawing: Drawing) -> Plan:
    """Return the connections of three tenants with floors, one of which needs little, and of a flood."""
    numbers = itertools.count()
    dialogues = [
        [
            Ask(
                kind=tenant,
                messages=drawing.messages(next(numbers), _FLOOD_TOKENS),
                output_tokens=_OUTPUT_TOKENS["short"],
                at_s=pause_s,
                tenant=tenant if tenant in FLOORS else f"{tenant}-{lane % _FLOOD_TENANTS}",
            )
            for _ in range(1 + int(scene.window[1]))
        ]
        for tenant, (lanes, pause_s) in _LANES.items()
        for lane in range(lanes)
    ]
    return Plan(kinds=tuple(_LANES), window=scene.window, dialogues=dialogues)


def _poisson(
    scene: SceneSettings,
    rate_per_s: float,
    drawing: Drawing,
    kind_of: Callable[[np.random.Generator], str],
) -> Sequence[Ask]:
    """Return requests until the end of the measurement."""
    gaps, lengths = drawing.rng("arrivals"), drawing.rng("lengths")
    asks: list[Ask] = []
    at_s = float(gaps.exponential(1 / rate_per_s))
    while at_s < scene.window[1]:
        kind = kind_of(lengths)
        tokens = int(lengths.integers(*(_LONG_TOKENS if kind in ("long", "heavy") else _SHORT_TOKENS)))
        tenant = f"light-{lengths.integers(_LIGHT_TENANTS)}" if kind == "light" else "default"
        asks.append(
            Ask(
                kind=kind,
                messages=drawing.messages(len(asks), tokens),
                output_tokens=_OUTPUT_TOKENS[kind],
                at_s=at_s,
                tenant="heavy" if kind == "heavy" else tenant,
            )
        )
        at_s += float(gaps.exponential(1 / rate_per_s))
    return asks


KILLED, STOPPED, SLOW = "killed", "stopped", "slow"
"""Scenes with the mix and a server that is killed or stopped, or slower than the other one."""
SCENES: Mapping[str, Callable[[SceneSettings, float, Drawing], Plan]] = {
    "mix": mix,
    "late_user": late_user,
    "conversations": conversations,
    "agents": agents,
    "tenants": tenants,
    "batch": batch,
    "floors": floors,
    KILLED: mix,
    STOPPED: mix,
    SLOW: mix,
}
