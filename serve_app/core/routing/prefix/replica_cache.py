"""The blocks that one replica has probably cached, by how recently they were used.

A prompt uses its blocks together, so they are stored in runs: neighbouring blocks of a prompt that no later
prompt has used. A prompt that starts like an earlier one moves the common blocks into its own run. The rest
of the earlier run retains its position in the order. The cost of a dispatch therefore grows with the number
of runs that it meets, few for most histories, and not with the number of blocks. The least recently used
run is cut from its end, as in vLLM.

A run is found by its first block. A hash covers everything before its block, so two runs are equal up to
any block that is equal in both, and their common part is found by bisection.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.core.routing.prefix.blocks import BLOCK_ENDS

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
