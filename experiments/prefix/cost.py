"""What prefix affinity costs: hashing how a prompt begins, and looking it up among the replicas."""

import itertools
import random
import time
from collections.abc import Callable
from functools import partial

from serve_app.routing.prefix.index import PrefixIndex
from serve_app.serving.gateway.request.prefix import Opening, prefix_hashes

_ROUNDS = 5
_LOOKUPS = 2_000
_HASHED_BYTES_A_ROUND = 2_000_000
# Blocks that the index may hold in all, and of one replica.
_CAPACITY, _SHELF = 500_000, 300_000
# Prompts have 48 blocks, and begin with one of 12 openings.
_OPENINGS, _OPENING_BLOCKS, _OWN_BLOCKS = 12, 8, 40
_PROMPTS_PER_REPLICA = 60


def hashing_us(size: int) -> float:
    """Microseconds to hash a text of so many bytes."""
    text = "A prompt of some words, and then some more. " * (size // 44 + 1)
    call = partial(prefix_hashes, Opening(b"text", (text,)), model="m")
    return _microseconds(call, max(_ROUNDS, _HASHED_BYTES_A_ROUND // size))


def index_us(replicas: int) -> dict[str, float]:
    """Microseconds of a look-up, and of a dispatch, which evicts what it adds; and the blocks held."""
    index, prompts = _filled_index(replicas)
    found, added = itertools.cycle(prompts), itertools.cycle(prompts)
    return {
        "lookup_us": _microseconds(lambda: index.better_than("s0", next(found), 8), _LOOKUPS),
        "dispatch_us": _microseconds(lambda: index.add("s1", next(added)), _LOOKUPS),
        "blocks": len(index),
    }


def _filled_index(replicas: int) -> tuple[PrefixIndex, list[tuple[int, ...]]]:
    """An index of full shelves, and the prompts that came last."""
    rng = random.Random(1)  # noqa: S311 - a measurement, no secret
    index = PrefixIndex(_CAPACITY)
    for number in range(replicas):
        index.join(f"s{number}", _SHELF)
    shared = [tuple(rng.getrandbits(64) for _ in range(_OPENING_BLOCKS)) for _ in range(_OPENINGS)]
    prompts = [
        (*rng.choice(shared), *(rng.getrandbits(64) for _ in range(_OWN_BLOCKS)))
        for _ in range(replicas * _PROMPTS_PER_REPLICA)
    ]
    for place, prompt in enumerate(prompts):
        index.add(f"s{place % replicas}", prompt)
    return index, prompts[-_LOOKUPS:]


def _microseconds(call: Callable[[], object], calls: int) -> float:
    """Time of one call, in the best of several rounds: others on the machine only add to it."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - began) / calls)
    return min(rounds) * 1e6
