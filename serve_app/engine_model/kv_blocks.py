"""The paged KV cache with prefix caching, as counts of blocks.

Blocks need no identity here. Every block is in exactly one of four states, so `total` is always

    private (held by one sequence) + named and held + cached (named, not held) + blank

`free` is cached + blank. When no blank block is left, the least recently used cached block is reused. A name
is the content hash of a full block of tokens; sequences with the same name share the block. vLLM's block pool
does the same: blocks without a hash go to the front of its free queue, blocks with one to the back.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from serve_app.engine_model.sequences import BlockName


class KVBlocks:
    """A pool of equal blocks with a prefix cache."""

    __slots__ = ("_blank", "_cached", "_holders", "total")

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"the KV cache needs at least one block, got {total}")
        self.total = total
        self._blank = total
        self._holders: dict[BlockName, int] = {}
        self._cached: OrderedDict[BlockName, None] = OrderedDict()

    def __repr__(self) -> str:
        named = len(self._holders)
        return f"<KVBlocks total={self.total} free={self.free} cached={len(self._cached)} named={named}>"

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self._blank + len(self._cached)

    def count_hits(self, names: Sequence[BlockName], limit: int) -> int:
        """Leading blocks that are in the cache, at most `limit`."""
        hits = 0
        for name in names[:limit]:
            if name not in self._holders and name not in self._cached:
                break
            hits += 1
        return hits

    def fits(self, blocks: int, hits: Sequence[BlockName] = ()) -> bool:
        """Whether `blocks` can be held when `hits` of them, the leading ones, are shared from the cache."""
        needed = blocks - sum(1 for name in hits if name in self._holders)
        return needed <= self.free

    def share(self, names: Iterable[BlockName]) -> None:
        """Hold cached blocks that `count_hits` has found."""
        for name in names:
            holders = self._holders.get(name)
            if holders is None:
                del self._cached[name]
                self._holders[name] = 1
            else:
                self._holders[name] = holders + 1

    def take(self, blocks: int) -> None:
        """Hold private blocks; the caller has checked that they fit."""
        if blocks <= self._blank:
            self._blank -= blocks
            return
        evicted = blocks - self._blank
        if evicted > len(self._cached):
            raise ValueError(f"{blocks} blocks wanted, only {self.free} of {self.total} are free")
        self._blank = 0
        for _ in range(evicted):
            self._cached.popitem(last=False)

    def name(self, block_name: BlockName) -> bool:
        """Name a private block; False when the name is taken, and the block then stays private."""
        if block_name in self._holders or block_name in self._cached:
            return False
        self._holders[block_name] = 1
        return True

    def release(self, private: int, names: Sequence[BlockName]) -> None:
        """Free private blocks, and named ones, which stay cached when no other sequence holds them."""
        self._blank += private
        # The end of a prefix is useless without its beginning, so it is evicted first.
        for name in reversed(names):
            holders = self._holders[name] - 1
            if holders:
                self._holders[name] = holders
            else:
                del self._holders[name]
                self._cached[name] = None

    def forget(self, names: Iterable[BlockName]) -> None:
        """Make the cached ones among these blocks blank again."""
        for name in names:
            if name in self._cached:
                del self._cached[name]
                self._blank += 1
