"""Which replica has probably computed the beginning of this prompt already? An approximate index.

The index learns from dispatches alone: a replica that was sent a prompt holds its blocks from then on, until
the blocks that it was sent since fill its KV cache. Engines are not asked, so it errs both ways: an engine
evicts earlier (answers take room as well), or later (it was idle), and it keeps the answer, which comes back
as part of the next prompt.

Theory of operation. A block's hash covers everything before the block, so equal hashes mean equal prompts up
to there. `_holders` maps a hash to the set of replicas that hold it, as the bits of one integer: sets of a
thousand replicas are united and compared in one step, so a look-up costs one dictionary access for each of
its at most 128 blocks, however many replicas there are. Each replica has a shelf, in the order of last use,
from which the longest unused blocks fall when it is full. A prompt is put on the shelf from its end to its
beginning, so of two blocks that were used together the later one in the prompt falls first, as in vLLM.

Rules, named as in its tests:
- `holds_whole_prefixes`: a replica that holds a block holds every block before it. So the sets only shrink
  along a prompt.
- `holders_mirror_the_shelves`: a bit is set exactly where a shelf has the block.
- `stays_within_its_capacity`: in tokens for each replica, in blocks for all of them together.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from serve_app.routing.prefix.blocks import BLOCK_TOKENS


@dataclass(slots=True, eq=False)
class _Shelf:
    """What one replica holds: tokens by block, least recently used first."""

    slot: int
    capacity_tokens: int
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict)
    tokens: int = 0

    @property
    def bit(self) -> int:
        return 1 << self.slot


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A replica, and how many leading blocks of a prompt it holds."""

    replica_id: str
    blocks: int


class PrefixIndex:
    """Blocks by replica.

    Args:
        max_blocks: on all shelves together; bounds the memory, at some 370 bytes each.
    """

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self._max_blocks = max_blocks
        self._shelves: dict[str, _Shelf] = {}
        self._by_slot: dict[int, str] = {}
        self._free_slots: list[int] = []
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks on all shelves together."""
        return sum(len(shelf.blocks) for shelf in self._shelves.values())

    def __repr__(self) -> str:
        return f"<PrefixIndex replicas={len(self._shelves)} blocks={len(self)} distinct={len(self._holders)}>"

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._shelves

    def tokens_of(self, replica_id: str) -> int:
        """Tokens on a replica's shelf."""
        return self._shelves[replica_id].tokens

    # What replicas hold

    def join(self, replica_id: str, capacity_tokens: int) -> None:
        """Give a replica an empty shelf; one that joins anew has started anew, with an empty cache."""
        self.lose(replica_id)
        slot = self._free_slots.pop() if self._free_slots else len(self._shelves)
        self._shelves[replica_id] = _Shelf(slot, capacity_tokens)
        self._by_slot[slot] = replica_id
        for shelf in self._shelves.values():
            self._evict(shelf)

    def lose(self, replica_id: str) -> None:
        """Forget a replica and all that it holds; unknown ones are ignored."""
        shelf = self._shelves.pop(replica_id, None)
        if shelf is None:
            return
        for block in shelf.blocks:
            self._drop_holder(block, shelf)
        del self._by_slot[shelf.slot]
        self._free_slots.append(shelf.slot)

    def add(self, replica_id: str, prefix: Sequence[int]) -> None:
        """A replica has been sent a prompt with these blocks; unknown replicas are ignored."""
        shelf = self._shelves.get(replica_id)
        if shelf is None:
            return
        bit, blocks = shelf.bit, shelf.blocks
        for place in range(min(len(prefix), len(BLOCK_TOKENS)) - 1, -1, -1):
            block = prefix[place]
            if block in blocks:
                blocks.move_to_end(block)
                continue
            blocks[block] = BLOCK_TOKENS[place]
            shelf.tokens += BLOCK_TOKENS[place]
            self._holders[block] = self._holders.get(block, 0) | bit
        self._evict(shelf)

    # Look-up

    def longest(self, prefix: Sequence[int]) -> int:
        """How many leading blocks the replica holds that holds most of them."""
        for place in range(min(len(prefix), len(BLOCK_TOKENS)) - 1, -1, -1):
            if prefix[place] in self._holders:
                return place + 1
        return 0

    def match(self, prefix: Sequence[int]) -> dict[str, int]:
        """How many leading blocks each replica holds, most first; replicas without any are left out."""
        return {
            self._by_slot[slot]: blocks for blocks, holders in self._levels(prefix) for slot in _bits(holders)
        }

    def better_than(
        self, replica_id: str, prefix: Sequence[int], at_most: int
    ) -> tuple[int, list[PrefixMatch]]:
        """How many leading blocks this replica holds, and up to `at_most` replicas that hold more.

        Those that hold most come first. Of equals the first is another for each prompt, or prompts that share
        their beginning would all go to one replica.
        """
        shelf = self._shelves.get(replica_id)
        bit = shelf.bit if shelf is not None else 0
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
        for place in range(min(len(prefix), len(BLOCK_TOKENS)) - 1, -1, -1):
            new = self._holders.get(prefix[place], 0) & ~seen
            if new:
                seen |= new
                yield place + 1, new

    # Eviction

    def _evict(self, shelf: _Shelf) -> None:
        most_blocks = self._max_blocks // len(self._shelves)
        while shelf.tokens > shelf.capacity_tokens or len(shelf.blocks) > most_blocks:
            block, tokens = shelf.blocks.popitem(last=False)
            shelf.tokens -= tokens
            self._drop_holder(block, shelf)

    def _drop_holder(self, block: int, shelf: _Shelf) -> None:
        left = self._holders[block] & ~shelf.bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _bits(mask: int, start: int = 0) -> Iterator[int]:
    """The places of the bits that are set, from `start` upwards, then those below it."""
    above = mask >> start << start
    for part in (above, mask ^ above):
        left = part
        while left:
            lowest = left & -left
            yield lowest.bit_length() - 1
            left ^= lowest
