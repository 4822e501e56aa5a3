"""The prefix index: which replicas have probably computed the beginning of a prompt already.

The index learns from dispatches alone. A replica that was sent a prompt has its blocks cached, until the
blocks sent since fill its KV cache. Engines are not asked, so the index is approximate. An engine may evict
earlier, since answers take capacity too, or later, when it was idle. It also caches answers, which become
part of the next prompt.

Theory of operation. A block's hash covers everything before the block, so equal hashes mean equal prompts up
to its end. `_holders` maps a hash to the set of replicas that have it, as the bits of one integer. So sets of
a thousand replicas are compared in one step, and a look-up costs one dictionary access for each of at most
128 blocks. Each replica has an LRU list of its blocks. A prompt is added from its end to its beginning, so of
two blocks that were used together the later one in the prompt is evicted first, as in vLLM.

Invariants, named as in the tests:
- `holds_whole_prefixes`: a replica that has a block has every block before it. So the sets only shrink along
  a prompt.
- `holders_mirror_the_caches`: a bit is set exactly where the replica's list has the block.
- `stays_within_its_capacity`: in tokens for each replica, in blocks for all of them together.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from serve_app.routing.prefix.blocks import BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class _ReplicaCache:
    """The blocks of one replica: tokens by block, least recently used first."""

    slot: int
    capacity_tokens: int
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict)
    tokens: int = 0

    @property
    def bit(self) -> int:
        return 1 << self.slot


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A replica, and how many leading blocks of a prompt it has."""

    replica_id: str
    blocks: int


class PrefixIndex:
    """Blocks by replica.

    Args:
        max_blocks: of all replicas together; bounds the memory, at about 370 bytes each.
    """

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self._max_blocks = max_blocks
        self._caches: dict[str, _ReplicaCache] = {}
        self._by_slot: dict[int, str] = {}
        self._free_slots: list[int] = []
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks of all replicas together."""
        return sum(len(cache.blocks) for cache in self._caches.values())

    def __repr__(self) -> str:
        return f"<PrefixIndex replicas={len(self._caches)} blocks={len(self)} distinct={len(self._holders)}>"

    # What replicas have cached

    def join(self, replica_id: str, capacity_tokens: int) -> None:
        """Add a replica with an empty cache, also one that joins again after a restart."""
        self.lose(replica_id)
        slot = self._free_slots.pop() if self._free_slots else len(self._caches)
        self._caches[replica_id] = _ReplicaCache(slot, capacity_tokens)
        self._by_slot[slot] = replica_id
        for cache in self._caches.values():
            self._evict(cache)

    def lose(self, replica_id: str) -> None:
        """Remove a replica and its blocks; unknown ones are ignored."""
        cache = self._caches.pop(replica_id, None)
        if cache is None:
            return
        for block in cache.blocks:
            self._drop_holder(block, cache)
        del self._by_slot[cache.slot]
        self._free_slots.append(cache.slot)

    def add(self, replica_id: str, prefix: Sequence[int]) -> None:
        """A replica has been sent a prompt with these blocks; unknown replicas are ignored."""
        cache = self._caches.get(replica_id)
        if cache is None:
            return
        bit, blocks = cache.bit, cache.blocks
        for position in range(min(len(prefix), len(BLOCK_TOKENS)) - 1, -1, -1):
            block = prefix[position]
            if block in blocks:
                blocks.move_to_end(block)
                continue
            blocks[block] = BLOCK_TOKENS[position]
            cache.tokens += BLOCK_TOKENS[position]
            self._holders[block] = self._holders.get(block, 0) | bit
        self._evict(cache)

    # Look-up

    def longest(self, prefix: Sequence[int]) -> int:
        """Leading blocks of a prompt that the replica with the longest match has."""
        for position in range(min(len(prefix), len(BLOCK_TOKENS)) - 1, -1, -1):
            if prefix[position] in self._holders:
                return position + 1
        return 0

    def better_than(
        self, replica_id: str, prefix: Sequence[int], at_most: int
    ) -> tuple[int, list[PrefixMatch]]:
        """How many leading blocks this replica has, and up to `at_most` replicas that have more.

        The longest matches are first. The order of equals depends on the prompt, so that prompts that share
        their beginning do not all go to one replica.
        """
        cache = self._caches.get(replica_id)
        bit = cache.bit if cache is not None else 0
        start = prefix[-1] % (len(self._by_slot) or 1) if prefix else 0
        found: list[PrefixMatch] = []
        for blocks, holders in self._levels(prefix):
            if holders & bit:
                return blocks, found
            for slot in _bits(holders, start):
                if len(found) == at_most:
                    break
                found.append(PrefixMatch(self._by_slot[slot], blocks))
        return 0, found

    def _levels(self, prefix: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The replicas whose match ends at a block, from the longest match down."""
        seen = 0
        for position in range(min(len(prefix), len(BLOCK_TOKENS)) - 1, -1, -1):
            new = self._holders.get(prefix[position], 0) & ~seen
            if new:
                seen |= new
                yield position + 1, new

    # Eviction

    def _evict(self, cache: _ReplicaCache) -> None:
        most_blocks = self._max_blocks // len(self._caches)
        while cache.tokens > cache.capacity_tokens or len(cache.blocks) > most_blocks:
            block, tokens = cache.blocks.popitem(last=False)
            cache.tokens -= tokens
            self._drop_holder(block, cache)

    def _drop_holder(self, block: int, cache: _ReplicaCache) -> None:
        left = self._holders[block] & ~cache.bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _bits(mask: int, start: int = 0) -> Iterator[int]:
    """The positions of the set bits, from `start` upwards, then those below it."""
    above = mask >> start << start
    for part in (above, mask ^ above):
        left = part
        while left:
            lowest = left & -left
            yield lowest.bit_length() - 1
            left ^= lowest
