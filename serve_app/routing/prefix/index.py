"""The prefix index: which replicas have probably computed the beginning of a prompt already.

The index learns from dispatches alone. A replica that was sent a prompt has its blocks cached, until the
blocks sent since fill its KV cache. Engines are not asked, so the index is approximate. An engine may evict
earlier, since answers take capacity too, or later, when it was idle. It also caches answers, which become
part of the next prompt.

Theory of operation. A block's hash covers everything before the block, so equal hashes mean equal prompts up
to its end. `_holders` maps a hash to the set of replicas that have it, as the bits of one integer. So sets of
a thousand replicas are compared in one step. Along a prompt these sets only shrink, so how far some replicas
reach is found by bisection. `replica_cache` keeps for each replica which of its blocks were used least
recently. Of two blocks that were used together the later one in the prompt is evicted first, as in vLLM.

Invariants, named as in the tests:
- `holds_whole_prefixes`: a replica that has a block has every block before it. So the sets only shrink along
  a prompt.
- `holders_mirror_the_caches`: a bit is set exactly where the replica's list has the block.
- `stays_within_its_capacity`: in tokens for each replica, in blocks for all of them together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from serve_app.routing.prefix.blocks import BLOCK_TOKENS
from serve_app.routing.prefix.replica_cache import ReplicaCache

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
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
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
