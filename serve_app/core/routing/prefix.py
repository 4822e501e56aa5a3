"""Prefix affinity: the index of cached prompts, weighed against load.

- `BLOCK_ENDS`: the sizes of a prompt's blocks; `cached_tokens` returns the tokens in the first ones.
- `ReplicaCache`: the blocks that one replica has probably cached, by how recently they were used.
- `PrefixIndex`: the replicas that have probably computed the start of a prompt already.
- `PrefixAffinity`: weighs cached prefixes against load in the choice of a replica.

`ReplicaCache`. A prompt uses its blocks together, so they are stored in runs: neighbouring blocks of a prompt
that no later prompt has used. A prompt that starts like an earlier one moves the common blocks into its own
run. The rest of the earlier run retains its position in the order. The cost of a dispatch therefore grows
with the number of runs that it meets, few for most histories, and not with the number of blocks. The least
recently used run is cut from its end, as in vLLM.

A run is found by its first block. A hash covers everything before its block, so two runs are equal up to
any block that is equal in both, and their common part is found by bisection.

`PrefixIndex`. The index learns from dispatches alone. A replica that was sent a prompt has its blocks cached
until the blocks sent since fill its KV cache. The index is approximate, because engines do not report their
caches. An engine evicts a little earlier, because answers need capacity too. But forgetting a prefix costs
more, a prefill and the place of a session, than believing in one that is gone.

Theory of operation. A block's hash covers everything before the block, so equal hashes mean equal prompts
up to its end. `_holders` maps a hash to the set of replicas that have it, as the bits of one integer, so
sets of a thousand replicas are compared in one step. Along a prompt these sets only shrink, so the longest
match of a set of replicas is found by bisection. `ReplicaCache` orders the blocks of each replica by use.
Of two blocks that were used together, the later one in the prompt is evicted first, as in vLLM.

Invariants, named as in the tests:
- `holds_whole_prefixes`: a replica that has a block has every block before it. So the sets only shrink
  along a prompt.
- `holders_mirror_the_caches`: a bit is set exactly if the replica's cache has the block.
- `stays_within_its_capacity`: in tokens for each replica, in blocks for all replicas together.

`PrefixAffinity`. The replica selected by load alone is compared with replicas that have more of the prompt
cached. The request goes to the one with the least cost:

    cost = (tokens left to compute there + prefill tokens pending there) * (requests in flight there + 1)

The sum stands for the time to the first token, and the factor for the time of each further one. So sessions
spread over the fleet before a cache overflows. Only replicas that may accept the request now are compared, so
affinity leaves no capacity idle. But of a replica that has more of the prompt cached, the KV cache may be
full: the request waits in its engine, whose queue is short (`dispatch.backpressure`). Elsewhere it would need
the KV cache twice, so that all caches fill up, and sessions move ever more often.

Source: LMetric (arXiv 2603.15202), which knows all caches exactly, and dispatches at arrival.
"""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from serve_app.core.routing.prefill_cost import cost
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings_base import settings
from serve_app.request import PromptShape, Request

BYTES_PER_TOKEN = 4
"""Bytes of text that count as one token in the positions of blocks."""

_FIRST_BLOCKS = (128,) * 32
_LATER_BLOCKS = tuple(128 << octave for octave in range(1, 7) for _ in range(16))
BLOCK_TOKENS = _FIRST_BLOCKS + _LATER_BLOCKS
"""Tokens of each block, the first block first."""
BLOCK_ENDS = tuple(accumulate(BLOCK_TOKENS))
"""Tokens from the start of a prompt to the end of each block."""


def cached_tokens(shape: PromptShape, blocks: int, bytes_per_token: float) -> int:
    """Return the tokens of a prompt in its first `blocks` blocks.

    Args:
        bytes_per_token: ratio of this text; not used for prompts of token ids.
    """
    if blocks <= 0:
        return 0
    nominal = BLOCK_ENDS[min(blocks, len(BLOCK_ENDS)) - 1]
    if shape.prompt_tokens is not None:
        return min(nominal, shape.prompt_tokens)
    return int(nominal * BYTES_PER_TOKEN / bytes_per_token)


_TOKENS_BEFORE = (0, *BLOCK_ENDS)


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbouring blocks of one prompt; `start` is the position of the first one in it."""

    start: int
    blocks: Sequence[int]

    def common(self, prefix: Sequence[int]) -> int:
        """Return the number of blocks in common with a prompt that has the run's first block at `start`."""
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
    """The cached blocks of one replica.

    Args:
        slot: the replica's bit in sets of replicas.
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
        """Add the blocks of a dispatched prompt. Return how many leading ones were cached before.

        The cache may exceed its capacity afterwards: see `evict`.
        """
        known, size = 0, len(prefix)
        while known < size:
            run = self._starts.get(prefix[known])
            # Another position is a hash collision, which clients can provoke.
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
        """Evict blocks beyond the capacity or beyond `most_blocks`. Return the evicted blocks."""
        dropped = []
        while self.tokens > self._capacity_tokens or self.blocks > most_blocks:
            run = next(iter(self._runs))
            end = run.start + len(run.blocks)
            fits = bisect_right(_TOKENS_BEFORE, _TOKENS_BEFORE[end] - self.tokens + self._capacity_tokens) - 1
            kept_end = max(run.start, min(fits, end - self.blocks + most_blocks, end))
            dropped.append(self._cut_end(run, kept_end - run.start))
        return dropped

    def clear(self) -> list[Sequence[int]]:
        """Remove all blocks. Return them."""
        return [self._cut_end(run, 0) for run in list(self._runs)]

    def _cut_beginning(self, run: _Run, blocks: int) -> None:
        """Remove the first blocks of a run; they move to another run."""
        self._remove_start(run)
        if blocks == len(run.blocks):
            del self._runs[run]
            return
        run.start += blocks
        run.blocks = run.blocks[blocks:]
        self._starts[run.blocks[0]] = run

    def _cut_end(self, run: _Run, left: int) -> Sequence[int]:
        """Remove all blocks of a run except the first `left` ones. Return the removed ones."""
        dropped = run.blocks[left:]
        self.blocks -= len(dropped)
        self.tokens -= _TOKENS_BEFORE[run.start + len(run.blocks)] - _TOKENS_BEFORE[run.start + left]
        if left:
            run.blocks = run.blocks[:left]
        else:
            self._remove_start(run)
            del self._runs[run]
        return dropped

    def _remove_start(self, run: _Run) -> None:
        if self._starts.get(run.blocks[0]) is run:
            del self._starts[run.blocks[0]]


_ANY = -1


class PrefixIndex:
    """The cached blocks of all replicas, at most `max_blocks` of at most 330 bytes each."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._caches: dict[str, ReplicaCache] = {}
        self._by_slot: dict[int, str] = {}
        self._free_slots: list[int] = []
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of blocks of all replicas."""
        return sum(cache.blocks for cache in self._caches.values())

    def __repr__(self) -> str:
        return f"<PrefixIndex replicas={len(self._caches)} blocks={len(self)} distinct={len(self._holders)}>"

    # What replicas have cached

    def join(self, replica_id: str, capacity_tokens: int) -> None:
        """Add a replica with an empty cache. A replica that rejoins loses its blocks."""
        self.lose(replica_id)
        slot = self._free_slots.pop() if self._free_slots else len(self._caches)
        self._caches[replica_id] = ReplicaCache(slot, capacity_tokens)
        self._by_slot[slot] = replica_id
        for cache in self._caches.values():
            self._evict(cache)

    def lose(self, replica_id: str) -> None:
        """Remove a replica and its blocks. Unknown ones are ignored."""
        cache = self._caches.pop(replica_id, None)
        if cache is None:
            return
        for dropped in cache.clear():
            self._drop(dropped, cache.bit)
        del self._by_slot[cache.slot]
        self._free_slots.append(cache.slot)

    def add(self, replica_id: str, prefix: Sequence[int]) -> None:
        """Add the blocks of a prompt sent to a replica. Unknown replicas are ignored."""
        cache = self._caches.get(replica_id)
        if cache is None:
            return
        blocks = prefix[: len(BLOCK_TOKENS)]
        holders, bit = self._holders, cache.bit
        longest = self.longest(blocks)
        for block in blocks[cache.use(blocks) : longest]:
            holders[block] = holders.get(block, 0) | bit
        holders.update(dict.fromkeys(blocks[longest:], bit))
        self._evict(cache)

    # Look-up

    def longest(self, prefix: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt on the replica with the longest match."""
        return self._held(prefix, _ANY)

    def better_than(
        self, replica_id: str, prefix: Sequence[int], at_most: int
    ) -> tuple[int, list[tuple[str, int]]]:
        """Return the number of leading blocks on this replica, and up to `at_most` replicas that have more.

        Each comes with its number of leading blocks. The longest matches are first. The order of equals
        depends on the prompt, so that prompts with a common start do not all go to one replica.
        """
        cache = self._caches.get(replica_id)
        held = self._held(prefix, cache.bit) if cache is not None else 0
        start = prefix[-1] % (len(self._by_slot) or 1) if prefix else 0
        found: list[tuple[str, int]] = []
        others = _ANY
        while len(found) < at_most and (blocks := self._held(prefix, others)) > held:
            level = self._holders[prefix[blocks - 1]] & others
            others &= ~level
            matches = ((self._by_slot[slot], blocks) for slot in _bits(level, start))
            found.extend(islice(matches, at_most - len(found)))
        return held, found

    def _held(self, prefix: Sequence[int], replicas: int) -> int:
        """Return the number of leading blocks of a prompt that any of these replicas has."""
        holders = self._holders
        low, high = 0, min(len(prefix), len(BLOCK_TOKENS))
        # Fast path: no replica has cached most prompts.
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
    """Yield the positions of the set bits, from `start` upwards, then those below it."""
    above = mask >> start << start
    for part in (above, mask ^ above):
        left = part
        while left:
            lowest = left & -left
            yield lowest.bit_length() - 1
            left ^= lowest


# Replicas compared with the one selected by load, those with the longest match first.
_MAX_CANDIDATES = 8

ReplicaFilter = Callable[[str, int], ReplicaState | None]
"""Returns the replica with an id if it may accept a request with so many tokens to compute, else None."""

# Assumed KV cache of a replica that does not report its size: a small GPU with an 8B model.
LIKELY_KV_TOKENS = 100_000
# Bounds the index's memory at about 160 MB; 500 blocks for each of a thousand replicas.
_MAX_BLOCKS = 500_000


@settings(block="affinity")
class AffinitySettings:
    """Weight of the engines' prefix caches in the choice of a replica."""

    # Disable it for engines without prefix caching. vLLM enables prefix caching by default.
    enabled: bool = True


class PrefixAffinity:
    """Weighs prefix caches against load, for the replicas of one model.

    Args:
        bytes_per_token: returns the learned ratio of a prompt's text.
    """

    def __init__(
        self,
        settings: AffinitySettings,
        bytes_per_token: Callable[[PromptShape], float],
    ) -> None:
        self._settings = settings
        self._bytes_per_token = bytes_per_token
        self.index = PrefixIndex(_MAX_BLOCKS)

    def __repr__(self) -> str:
        return f"<PrefixAffinity {'on' if self._settings.enabled else 'off'} {self.index}>"

    # What replicas have cached

    def join(self, spec: ReplicaSpec) -> None:
        """Add a replica that has joined, with an empty cache."""
        if self._settings.enabled:
            kv_tokens = LIKELY_KV_TOKENS if spec.kv_tokens is None else spec.kv_tokens
            self.index.join(spec.replica_id, kv_tokens)

    def lose(self, replica_id: str) -> None:
        """Remove a lost replica and its cache."""
        self.index.lose(replica_id)

    def on_dispatch(self, replica_id: str, request: Request) -> None:
        """Add the prompt of a dispatched request to the replica's cache."""
        self.index.add(replica_id, request.submission.prefix)

    # Choice

    def cached_tokens(self, request: Request, prompt_tokens: int) -> int:
        """Return the prompt tokens cached by the replica with the longest match; never all of them.

        It is used before a replica is selected. It is an upper estimate, because that replica may have no
        capacity.
        """
        return prompt_tokens - self._left(
            request, prompt_tokens, self.index.longest(request.submission.prefix)
        )

    def cached_on(self, replica_id: str, request: Request, prompt_tokens: int) -> int:
        """Return the prompt tokens cached by one replica; never all of them."""
        held, _ = self.index.better_than(replica_id, request.submission.prefix, 0)
        return prompt_tokens - self._left(request, prompt_tokens, held)

    def choose(
        self, by_load: ReplicaState | None, request: Request, prompt_tokens: int, admissible: ReplicaFilter
    ) -> tuple[ReplicaState, int] | None:
        """Return the replica selected by load, or one with sufficiently more of the prompt cached.

        With it comes the number of prompt tokens that remain to be computed there.

        Args:
            by_load: None if no replica may accept the whole prompt. Then the first admissible replica that
                has a part of it cached is returned.
        """
        if not request.submission.prefix:
            return None if by_load is None else (by_load, prompt_tokens)
        name = "" if by_load is None else by_load.spec.replica_id
        held, more = self.index.better_than(name, request.submission.prefix, _MAX_CANDIDATES)
        best = None if by_load is None else (by_load, self._left(request, prompt_tokens, held))
        least = math.inf if best is None else cost(*best)
        for replica_id, blocks in more:
            left = self._left(request, prompt_tokens, blocks)
            replica = admissible(replica_id, left)
            if replica is None:
                continue
            if by_load is None:
                return replica, left
            if (figure := cost(replica, left)) < least:
                best, least = (replica, left), figure
        return best

    def _left(self, request: Request, prompt_tokens: int, blocks: int) -> int:
        if not blocks:
            return prompt_tokens
        ratio = self._bytes_per_token(request.shape)
        return max(1, prompt_tokens - cached_tokens(request.shape, blocks, ratio))
