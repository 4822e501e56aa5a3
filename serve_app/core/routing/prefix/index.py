"""The prefix index: the replicas that have probably computed the start of a prompt already.

The index learns from dispatches alone. A replica that was sent a prompt has its blocks cached until the
blocks sent since fill its KV cache. The index is approximate, because engines do not report their caches.
An engine evicts a little earlier, because answers need capacity too. But forgetting a prefix costs more, a
prefill and the place of a session, than believing in one that is gone.

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
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from serve_app.core.routing.prefix.blocks import BLOCK_TOKENS
from serve_app.core.routing.prefix.replica_cache import ReplicaCache

_ANY = -1


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A replica, and the number of leading blocks of a prompt that it has."""

    replica_id: str
    blocks: int


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
    ) -> tuple[int, list[PrefixMatch]]:
        """Return the number of leading blocks on this replica, and up to `at_most` replicas that have more.

        The longest matches are first. The order of equals depends on the prompt, so that prompts with a
        common start do not all go to one replica.
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
