"""Prefix affinity: the index of cached prompt blocks, and when a cached prefix outweighs lower load.

The rule compares the replica that load alone would choose (`there`) with those that have more of the prompt
cached (`here`):

    saved  = (tokens left to compute there - tokens left here) * t
    waited = (prefill tokens pending here - pending there) * t
    slowed = expected output * (requests in flight here - in flight there) * step_cost_tokens * t
    choose the largest saved - waited - slowed, if that is above zero; otherwise the one chosen by load

`t` is the learned prefill time of a token, so all terms are seconds of this request. A replica may have less
work than the one chosen by load, because load is judged by free KV tokens. Its terms are then negative, and
count as gains. Only replicas that may take the request right now are compared. So affinity never leaves
capacity idle, and a request never waits for one replica.

Source: cache-aware routers (SGLang, llm-d, Ray's prefix router) balance a hit ratio against a queue length by
thresholds that an operator sets. Here both sides are times.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Annotated

from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings_base import INTERNAL, NOT_NEGATIVE, settings
from serve_app.request import PromptShape, Request, TextCategory

BYTES_PER_TOKEN = 4
"""Bytes of text that count as one token in the positions below."""

_FIRST_BLOCKS = (128,) * 32
_LATER_BLOCKS = tuple(128 << octave for octave in range(1, 7) for _ in range(16))
BLOCK_TOKENS = _FIRST_BLOCKS + _LATER_BLOCKS
"""Tokens of each block, the first block first."""
BLOCK_ENDS = tuple(accumulate(BLOCK_TOKENS))
"""Tokens from the start of a prompt to the end of each block."""


def cached_tokens(shape: PromptShape, blocks: int, bytes_per_token: float) -> int:
    """Tokens of a prompt in its first `blocks` blocks.

    Args:
        bytes_per_token: of this kind of text; not needed for token ids.
    """
    if blocks <= 0:
        return 0
    nominal = BLOCK_ENDS[min(blocks, len(BLOCK_ENDS)) - 1]
    if shape.prompt_tokens is not None:
        return min(nominal, shape.prompt_tokens)
    return int(nominal * BYTES_PER_TOKEN / bytes_per_token)


# The blocks that one replica has probably cached, by how recently they were used.
#
# A prompt uses its blocks together, so they are kept in runs: neighbouring blocks of a prompt that no later
# one has used. A prompt that begins like an earlier one takes the common blocks over into its own run. The
# rest of the earlier one stays where it is in the order. So a dispatch costs by the number of runs that it
# meets, few for most histories, and not by the number of blocks. The least recently used run is cut from its
# end, as in vLLM.
#
# A run is found by its first block. Since a hash covers everything before its block, two runs are equal as
# far as one block of both is, and their common part is found by bisection.


_TOKENS_BEFORE = (0, *BLOCK_ENDS)


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbouring blocks of one prompt, the first of which has the position `start` in it."""

    start: int
    blocks: Sequence[int]

    def common(self, prefix: Sequence[int]) -> int:
        """How many blocks a prompt has in common with it whose block at `start` is its first."""
        blocks, start = self.blocks, self.start
        low, high = 1, min(len(blocks), len(prefix) - start)
        if blocks[high - 1] == prefix[start + high - 1]:
            return high
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] == prefix[start + middle]:
                low = middle + 1
            else:
                high = middle
        return low


class ReplicaCache:
    """The blocks of one replica.

    Args:
        slot: the replica's bit in sets of replicas.

    Attributes:
        tokens: of all blocks.
    """

    __slots__ = ("_capacity_tokens", "_runs", "_starts", "bit", "blocks", "slot", "tokens")

    def __init__(self, slot: int, capacity_tokens: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.blocks = self.tokens = 0
        self._capacity_tokens = capacity_tokens
        # Least recently used first.
        self._runs: OrderedDict[_Run, None] = OrderedDict()
        self._starts: dict[int, _Run] = {}

    def use(self, prefix: Sequence[int]) -> int:
        """A prompt has been sent; how many of its leading blocks were there before.

        It may then have more than its capacity: see `evict`.
        """
        known, size = 0, len(prefix)
        while known < size:
            run = self._starts.get(prefix[known])
            # Another position is a collision of hashes, which clients can bring about.
            if run is None or run.start != known:
                break
            common = run.common(prefix)
            known += common
            self._cut_beginning(run, common)
        if size:
            run = self._starts[prefix[0]] = _Run(0, prefix)
            self._runs[run] = None
        self.blocks += size - known
        self.tokens += _TOKENS_BEFORE[size] - _TOKENS_BEFORE[known]
        return known

    def evict(self, most_blocks: int) -> list[Sequence[int]]:
        """Drop what is beyond its capacity, or beyond so many blocks; the blocks that were dropped."""
        dropped = []
        while self.tokens > self._capacity_tokens or self.blocks > most_blocks:
            run = next(iter(self._runs))
            end = run.start + len(run.blocks)
            fits = bisect_right(_TOKENS_BEFORE, _TOKENS_BEFORE[end] - self.tokens + self._capacity_tokens) - 1
            kept_end = max(run.start, min(fits, end - self.blocks + most_blocks, end))
            dropped.append(self._cut_end(run, kept_end - run.start))
        return dropped

    def clear(self) -> list[Sequence[int]]:
        """Drop everything; the blocks that were dropped."""
        return [self._cut_end(run, 0) for run in list(self._runs)]

    def _cut_beginning(self, run: _Run, blocks: int) -> None:
        """Take the first blocks out of a run; they go to another one."""
        self._forget_start(run)
        if blocks == len(run.blocks):
            del self._runs[run]
            return
        run.start += blocks
        run.blocks = run.blocks[blocks:]
        self._starts[run.blocks[0]] = run

    def _cut_end(self, run: _Run, left: int) -> Sequence[int]:
        """Drop all blocks of a run but the first ones; those that were dropped."""
        dropped = run.blocks[left:]
        self.blocks -= len(dropped)
        self.tokens -= _TOKENS_BEFORE[run.start + len(run.blocks)] - _TOKENS_BEFORE[run.start + left]
        if left:
            run.blocks = run.blocks[:left]
        else:
            self._forget_start(run)
            del self._runs[run]
        return dropped

    def _forget_start(self, run: _Run) -> None:
        if self._starts.get(run.blocks[0]) is run:
            del self._starts[run.blocks[0]]


# The prefix index: which replicas have probably computed the beginning of a prompt already.
#
# The index learns from dispatches alone. A replica that was sent a prompt has its blocks cached, until the
# blocks sent since fill its KV cache. Engines are not asked, so the index is approximate. An engine may evict
# earlier, since answers take capacity too, or later, when it was idle. It also caches answers, which become
# part of the next prompt.
#
# Theory of operation. A block's hash covers everything before the block, so equal hashes mean equal prompts
# up to its end. `_holders` maps a hash to the set of replicas that have it, as the bits of one integer. So
# sets of a thousand replicas are compared in one step. Along a prompt these sets only shrink, so how far some
# replicas reach is found by bisection. `replica_cache` keeps for each replica which of its blocks were used
# least recently. Of two blocks that were used together the later one in the prompt is evicted first, as in
# vLLM.
#
# Invariants, named as in the tests:
# - `holds_whole_prefixes`: a replica that has a block has every block before it. So the sets only shrink
#   along a prompt.
# - `holders_mirror_the_caches`: a bit is set exactly where the replica's list has the block.
# - `stays_within_its_capacity`: in tokens for each replica, in blocks for all of them together.


_ANY = -1


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A replica, and how many leading blocks of a prompt it has."""

    replica_id: str
    blocks: int


class PrefixIndex:
    """Blocks by replica.

    Args:
        max_blocks: of all replicas together; bounds the memory, at 330 bytes each or less.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._caches: dict[str, ReplicaCache] = {}
        self._by_slot: dict[int, str] = {}
        self._free_slots: list[int] = []
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks of all replicas together."""
        return sum(cache.blocks for cache in self._caches.values())

    def __repr__(self) -> str:
        return f"<PrefixIndex replicas={len(self._caches)} blocks={len(self)} distinct={len(self._holders)}>"

    # What replicas have cached

    def join(self, replica_id: str, capacity_tokens: int) -> None:
        """Add a replica with an empty cache, also one that joins again after a restart."""
        self.lose(replica_id)
        slot = self._free_slots.pop() if self._free_slots else len(self._caches)
        self._caches[replica_id] = ReplicaCache(slot, capacity_tokens)
        self._by_slot[slot] = replica_id
        for cache in self._caches.values():
            self._evict(cache)

    def lose(self, replica_id: str) -> None:
        """Remove a replica and its blocks; unknown ones are ignored."""
        cache = self._caches.pop(replica_id, None)
        if cache is None:
            return
        for dropped in cache.clear():
            self._drop(dropped, cache.bit)
        del self._by_slot[cache.slot]
        self._free_slots.append(cache.slot)

    def add(self, replica_id: str, prefix: Sequence[int]) -> None:
        """A replica has been sent a prompt with these blocks; unknown replicas are ignored."""
        cache = self._caches.get(replica_id)
        if cache is None:
            return
        blocks = prefix[: len(BLOCK_TOKENS)]
        holders, bit = self._holders, cache.bit
        anyone = self.longest(blocks)
        for block in blocks[cache.use(blocks) : anyone]:
            holders[block] = holders.get(block, 0) | bit
        holders.update(dict.fromkeys(blocks[anyone:], bit))
        self._evict(cache)

    # Look-up

    def longest(self, prefix: Sequence[int]) -> int:
        """Leading blocks of a prompt that the replica with the longest match has."""
        return self._held(prefix, _ANY)

    def better_than(
        self, replica_id: str, prefix: Sequence[int], at_most: int
    ) -> tuple[int, list[PrefixMatch]]:
        """How many leading blocks this replica has, and up to `at_most` replicas that have more.

        The longest matches are first. The order of equals depends on the prompt, so that prompts that share
        their beginning do not all go to one replica.
        """
        cache = self._caches.get(replica_id)
        held = self._held(prefix, cache.bit) if cache is not None else 0
        start = prefix[-1] % (len(self._by_slot) or 1) if prefix else 0
        found: list[PrefixMatch] = []
        others = _ANY
        while len(found) < at_most and (blocks := self._held(prefix, others)) > held:
            level = self._holders[prefix[blocks - 1]] & others
            others &= ~level
            matches = (PrefixMatch(self._by_slot[slot], blocks) for slot in _bits(level, start))
            found.extend(islice(matches, at_most - len(found)))
        return held, found

    def _held(self, prefix: Sequence[int], replicas: int) -> int:
        """Leading blocks of a prompt that one of these replicas has."""
        holders = self._holders
        low, high = 0, min(len(prefix), len(BLOCK_TOKENS))
        # Most prompts are known to nobody.
        if not high or not holders.get(prefix[0], 0) & replicas:
            return 0
        while low < high:
            middle = (low + high) // 2
            if holders.get(prefix[middle], 0) & replicas:
                low = middle + 1
            else:
                high = middle
        return low

    # Eviction

    def _evict(self, cache: ReplicaCache) -> None:
        for dropped in cache.evict(self._max_blocks // len(self._caches)):
            self._drop(dropped, cache.bit)

    def _drop(self, blocks: Sequence[int], bit: int) -> None:
        holders = self._holders
        for block in blocks:
            left = holders.pop(block, 0) & ~bit
            if left:
                holders[block] = left


def _bits(mask: int, start: int = 0) -> Iterator[int]:
    """The positions of the set bits, from `start` upwards, then those below it."""
    above = mask >> start << start
    for part in (above, mask ^ above):
        left = part
        while left:
            lowest = left & -left
            yield lowest.bit_length() - 1
            left ^= lowest


# Replicas compared with the one chosen by load, those with the longest match first.
_MAX_CANDIDATES = 8


@settings(block="affinity")
class AffinitySettings:
    """How the prefix caches of engines count when a replica is chosen."""

    # For engines without prefix caching, switch it off; vLLM has it by default.
    enabled: bool = True
    # What one more request in the batch adds to each decode step, in prefill tokens: 3.2 by the profile of a
    # 70B model on four H100, 0.8 for an 8B model on an RTX 4090. Higher balances load more evenly, lower
    # keeps more sessions on their replica.
    step_cost_tokens: Annotated[float, NOT_NEGATIVE, INTERNAL] = 2.0


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A prompt that a replica is sought for.

    Attributes:
        prompt_tokens: expected, cached or not.
        output_tokens: expected, of all choices.
    """

    request: Request
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixPlacement:
    """A replica, and the tokens of the prompt that are left to compute there."""

    replica: ReplicaState
    prefill_tokens: int


ReplicaFilter = Callable[[str, int], ReplicaState | None]
"""The named replica if it may be sent a request now with so many tokens to compute, else None."""


# Of a replica that does not state its cache: what a small GPU holds of a model of 8B.
_LIKELY_KV_TOKENS = 100_000
# Share of a KV cache assumed to hold past prompts; answers and running requests take the rest. Too much
# expects hits on evicted prefixes, too little forgets prefixes that are still cached.
_CAPACITY_RATIO = 0.7
# Bounds the index's memory at about 160 MB; 500 blocks for each of a thousand replicas.
_MAX_BLOCKS = 500_000


class PrefixAffinity:
    """Weighs prefix caches against load, for the replicas of one model.

    Args:
        prefill_costs: the scheduler's own, which go on learning.
        bytes_per_token: the learned ratio of a text category.
    """

    def __init__(
        self,
        settings: AffinitySettings,
        prefill_costs: PrefillCosts,
        bytes_per_token: Callable[[TextCategory], float],
    ) -> None:
        self._settings = settings
        self._prefill_costs = prefill_costs
        self._bytes_per_token = bytes_per_token
        self.index = PrefixIndex(_MAX_BLOCKS)

    def __repr__(self) -> str:
        return f"<PrefixAffinity {'on' if self._settings.enabled else 'off'} {self.index}>"

    # What replicas have cached

    def join(self, spec: ReplicaSpec) -> None:
        """A replica has joined; its cache is taken to be empty."""
        if self._settings.enabled:
            kv_tokens = _LIKELY_KV_TOKENS if spec.kv_tokens is None else spec.kv_tokens
            self.index.join(spec.replica_id, int(kv_tokens * _CAPACITY_RATIO))

    def lose(self, replica_id: str) -> None:
        """A replica is gone, and its cache with it."""
        self.index.lose(replica_id)

    def on_dispatch(self, replica_id: str, request: Request) -> None:
        """A replica has been sent a request."""
        self.index.add(replica_id, request.submission.prefix)

    # Choice

    def cached_tokens(self, request: Request, prompt_tokens: int) -> int:
        """Tokens of a prompt that the replica with the longest match has cached; never all of them.

        It is used before a replica is chosen. It is an upper estimate, since that replica may have no
        capacity.
        """
        return prompt_tokens - self._left(
            request, prompt_tokens, self.index.longest(request.submission.prefix)
        )

    def choose(
        self, by_load: ReplicaState | None, query: PrefixQuery, admissible: ReplicaFilter
    ) -> PrefixPlacement | None:
        """The replica that load chose, or one that has enough more of the prompt cached.

        Args:
            by_load: None when no replica may take the whole prompt. The first admissible one that has a part
                of it cached is chosen then.
        """
        request, prompt_tokens = query.request, query.prompt_tokens
        if not request.submission.prefix:
            return None if by_load is None else PrefixPlacement(by_load, prompt_tokens)
        name = "" if by_load is None else by_load.spec.replica_id
        held, more = self.index.better_than(name, request.submission.prefix, _MAX_CANDIDATES)
        best = None if by_load is None else PrefixPlacement(by_load, self._left(request, prompt_tokens, held))
        baseline, best_gain_s = best, 0.0
        for match in more:
            left = self._left(request, prompt_tokens, match.blocks)
            replica = admissible(match.replica_id, left)
            if replica is None:
                continue
            if baseline is None:
                return PrefixPlacement(replica, left)
            gain_s = self._gain_s(PrefixPlacement(replica, left), baseline, query)
            if gain_s > best_gain_s:
                best, best_gain_s = PrefixPlacement(replica, left), gain_s
        return best

    def _gain_s(self, here: PrefixPlacement, there: PrefixPlacement, query: PrefixQuery) -> float:
        """Seconds that the request saves here rather than there."""
        saved = there.prefill_tokens - here.prefill_tokens
        waited = here.replica.pending_prefill_tokens - there.replica.pending_prefill_tokens
        more_in_flight = here.replica.in_flight - there.replica.in_flight
        slowed = query.output_tokens * more_in_flight * self._settings.step_cost_tokens
        return (saved - waited - slowed) * self._prefill_costs.of(here.replica.spec.pool).per_token_s

    def _left(self, request: Request, prompt_tokens: int, blocks: int) -> int:
        if not blocks:
            return prompt_tokens
        ratio = self._bytes_per_token(request.shape.category)
        return max(1, prompt_tokens - cached_tokens(request.shape, blocks, ratio))
