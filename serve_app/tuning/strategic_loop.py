"""Strategic loop: decides when to relearn length queues, and whether the result is worth a change.

Lengths are observed one by one. `due` is called periodically, and returns a partition if a new one should
replace the current one. Time is an argument, so the same lengths at the same times give the same partitions.

Refine-and-Prune runs on the latest lengths: first as soon as a `window` of them was observed, then every
`interval_s` if there are enough new ones. A run takes about 25 ms. Its result is applied only if prompts
would see noticeably different queues (`partition_distance`), because each change routes all waiting requests
again and renames the queues in dashboards. So sudden changes of traffic, slow ones and none need no separate
rules.

Source: the strategic loop of EWSJF (arXiv 2601.21758). It relearns every ten minutes or when a test detects
drift, and adjusts the bounds in between. Relearning once a minute replaces all three.

`refine_and_prune` learns length queues by k-means, significant gaps and pruning. The input is a sample of
prompt lengths, the output a `Partition`. The same lengths give the same queues in any order.

1. *Coarse*: one-dimensional k-means cuts the sorted lengths into short, medium and long.
2. *Refine*: inside a cluster, a gap between neighbours is significant if it is wider than `alpha` mean gaps.
   The widest significant gap splits the cluster, and each half is examined with its own mean gap.
3. *Prune*: while there are more than `max_queues`, the neighbours of the highest utility are merged (Eq 3):

    U(i, i+1) = (rho_i + rho_{i+1}) / (|b_bar_{i+1} - b_bar_i| + eps)

with rho a queue's density (requests per token of width) and b_bar its mean length. The sources do not specify
which pair is merged. Merging the highest is what the released code does in effect; merging the lowest left
queues four times as wide.

`mode="paper"` refines the raw lengths, as published. Its mean gap shrinks as the sample grows, while no gap
can be smaller than one token. With enough requests *every* gap is significant, whatever alpha, and only
pruning ends the splitting. `mode="stable"` (this project's, the default) applies the same steps to quantities
that a larger sample only makes more precise:

- `sample_size` lengths, evenly spaced in rank, represent the whole. A gap between two of them is the range
  that holds a fixed share of the requests, however many there are.
- It uses logarithms of lengths, because costs are relative, and so are `relative_range` and the tolerances of
  Dynamic Queue Routing.
- The cut is in the widest gap of all lengths, not only of the thinned ones.
- A queue with less than `min_share` of the sample is merged with its nearer neighbour.

Source: EWSJF (arXiv 2601.21758), section 4.2.
"""

import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.settings_base import FINITE_POSITIVE, at_least, between, settings
from serve_app.errors import ServeAppError

Lengths = npt.NDArray[np.int64]
"""Prompt lengths in tokens, in ascending order."""
Values = npt.NDArray[np.float64]
"""Lengths or their logarithms, in ascending order."""

# Below this, integers are exact as floating-point numbers, which k-means needs.
_MAX_TOKENS = 2**53
# Decimal places of the midpoints between centres. Threads add in any order, and a rounding error must not
# move a length that is exactly at a midpoint to the other side.
_PLACES = 6
_RESTARTS = 5
# Keeps Eq 3 finite. Means of neighbours differ by far more, except for lengths that are a token apart.
_EPSILON_TOKENS = 1e-6


class LengthsError(ServeAppError):
    """Prompt lengths from which no queues can be learned. The message has the first invalid one."""


@settings(block="refine_and_prune")
class RefineAndPruneSettings:
    """Settings for learning queues from prompt lengths.

    Attributes:
        mode: `paper` or `stable`, see above.
        alpha: width of a significant gap, in mean gaps of its cluster. Lower values make more queues: about
            25 at 1, and 3 to 12 at 5.5, the value of the released code.
        clusters: k of the coarse k-means: short, medium, long.
        max_queues: maximum number of queues; more are pruned.
        relative_range: a cluster whose lengths differ by less than this share of their mean is not split.
        min_cluster_size: a cluster of fewer lengths is not split; mode `paper` only.
        sample_size: number of lengths that represent the sample; mode `stable` only. A quarter of the
            smallest sample that should give the same queues (500), so that each gap averages several.
        min_share: minimum share of the sample in a queue; mode `stable` only.
        seed: seed of k-means.
    """

    mode: Literal["stable", "paper"] = "stable"
    alpha: Annotated[float, FINITE_POSITIVE] = 5.5
    clusters: Annotated[int, at_least(1)] = 3
    max_queues: Annotated[int, at_least(1)] = 32
    relative_range: Annotated[float, FINITE_POSITIVE] = 0.2
    min_cluster_size: Annotated[int, at_least(2)] = 50
    sample_size: Annotated[int, at_least(16)] = 128
    min_share: Annotated[float, between(0, 0.5).hint("0.01 allows up to 100 queues")] = 0.01
    seed: int = 0


PAPER = RefineAndPruneSettings(mode="paper", alpha=1.5)
"""The published method with the paper's alpha."""


def refine_and_prune(
    lengths: Sequence[int] | npt.NDArray[np.integer], settings: RefineAndPruneSettings
) -> Partition:
    """Learn the length queues of a sample of prompt lengths, in tokens.

    Raises:
        LengthsError: there are no lengths, or one is not a whole number from 1 to 2**53.
    """
    ordered = _checked(lengths)
    cuts = _stable_cuts(ordered, settings) if settings.mode == "stable" else _paper_cuts(ordered, settings)
    queues = [_interval(part) for part in np.split(ordered, cuts)]
    return Partition(tuple(prune(queues, settings.max_queues)))


def _checked(lengths: Sequence[int] | npt.NDArray[np.integer]) -> Lengths:
    """Validate the lengths and return them in ascending order."""
    given = np.asarray(lengths)
    if given.ndim != 1 or given.size == 0:
        raise LengthsError(
            f"length queues are learned from a list of at least one prompt length, got shape {given.shape}: "
            "wait until requests have been observed"
        )
    if not np.issubdtype(given.dtype, np.integer):
        raise LengthsError(f"prompt lengths must be whole numbers, got {given.dtype}: {given[:3].tolist()}")
    shortest, longest = int(given.min()), int(given.max())
    if shortest < 1 or longest > _MAX_TOKENS:
        wrong = shortest if shortest < 1 else longest
        raise LengthsError(f"a prompt must have 1 to 2**53 tokens, got {wrong}")
    return np.sort(given.astype(np.int64))


def _interval(members: Lengths) -> LengthInterval:
    shortest, longest = int(members[0]), int(members[-1])
    return LengthInterval(
        min_tokens=shortest,
        max_tokens=longest,
        # Rounding can put the mean of equal numbers outside their range.
        mean_tokens=min(max(float(members.mean()), shortest), longest),
        count=len(members),
    )


# Coarse and refine. A cut is the index of the first member to its right.


def _paper_cuts(lengths: Lengths, settings: RefineAndPruneSettings) -> list[int]:
    """Return the cuts of the published refinement."""

    def is_settled(cluster: Values) -> bool:
        is_narrow = cluster[-1] - cluster[0] < settings.relative_range * cluster.mean()
        return bool(is_narrow) or len(cluster) < settings.min_cluster_size

    return _cuts(lengths.astype(np.float64), settings, is_settled)


def _stable_cuts(lengths: Lengths, settings: RefineAndPruneSettings) -> list[int]:
    """Return the cuts of the stable variant."""
    logs = np.log(lengths)
    picked = _evenly_spaced(len(logs), settings.sample_size)

    def is_settled(members: Values) -> bool:
        return bool(members[-1] - members[0] < settings.relative_range)

    cuts = _cuts(logs[picked], settings, is_settled)
    in_whole = [_widest_gap(logs, picked[cut - 1], picked[cut]) for cut in cuts]
    return _with_share(logs, in_whole, max(1, math.ceil(settings.min_share * len(logs))))


def _cuts(
    values: Values, settings: RefineAndPruneSettings, is_settled: Callable[[Values], bool]
) -> list[int]:
    """Return the cuts of k-means, and those at significant gaps inside each cluster."""
    coarse = coarse_cuts(values, settings.clusters, settings.seed)
    cuts = list(coarse)
    for edges in itertools.pairwise([0, *coarse, len(values)]):
        cuts += gap_cuts(values, edges, settings.alpha, is_settled)
    return sorted(cuts)


def coarse_cuts(values: Values, clusters: int, seed: int) -> list[int]:
    """Return the cuts of one-dimensional k-means, at most `clusters - 1`."""
    distinct, counts = np.unique(values, return_counts=True)
    clusters = min(clusters, len(distinct))
    if clusters < 2:
        return []
    # Imported here because it takes seconds, for which importers of the settings should not wait.
    from sklearn.cluster import KMeans  # noqa: PLC0415
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415 - see above

    model = KMeans(clusters, init="k-means++", n_init=_RESTARTS, random_state=seed)
    with warnings.catch_warnings():
        # If the values allow fewer clusters, fewer cuts are correct.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # Each distinct value once, weighted by its count: the same objective on far fewer points.
        model.fit(distinct.reshape(-1, 1), sample_weight=counts.astype(np.float64))
    centres = np.sort(model.cluster_centers_.ravel())
    midpoints = np.round((centres[:-1] + centres[1:]) / 2, _PLACES)
    positions = np.searchsorted(values, midpoints, side="right")
    return [int(position) for position in np.unique(positions) if 0 < position < len(values)]


def gap_cuts(
    values: Values, edges: tuple[int, int], alpha: float, is_settled: Callable[[Values], bool]
) -> list[int]:
    """Return the cuts at significant gaps between `edges`. Of equally wide gaps, the first splits.

    A range for which `is_settled` holds, or whose widest gap is not significant, is not split.
    """
    cuts = []
    open_ranges = [edges]  # a stack instead of recursion: a raw sample may split one by one
    while open_ranges:
        first, end = open_ranges.pop()
        members = values[first:end]
        if len(members) < 2 or is_settled(members):
            continue
        gaps = np.diff(members)
        widest = int(np.argmax(gaps))
        if gaps[widest] <= alpha * gaps.mean():
            continue
        cut = first + widest + 1
        cuts.append(cut)
        open_ranges += [(first, cut), (cut, end)]
    return sorted(cuts)


def _evenly_spaced(count: int, wanted: int) -> Lengths:
    """Return the middles of `wanted` equal parts of the sample, or all positions of a small one."""
    wanted = min(count, wanted)
    positions: Lengths = ((np.arange(wanted) + 0.5) * count / wanted).astype(np.int64)
    return positions


def _widest_gap(logs: Values, first: int, last: int) -> int:
    """Return the cut of all lengths at the widest gap between two of the thinned ones, the first if equal."""
    return int(first + np.argmax(np.diff(logs[first : last + 1]))) + 1


def _with_share(logs: Values, cuts: list[int], least: int) -> list[int]:
    """Merge queues of fewer than `least` members with their neighbours, smallest first; return the cuts."""
    edges = [0, *cuts, len(logs)]
    while len(edges) > 2:
        sizes = np.diff(edges)
        smallest = int(np.argmin(sizes))
        if sizes[smallest] >= least:
            break
        inner = [index for index in (smallest, smallest + 1) if 0 < index < len(edges) - 1]
        nearer = min(inner, key=lambda index: logs[edges[index]] - logs[edges[index] - 1])
        del edges[nearer]
    return edges[1:-1]


# Prune


def prune(intervals: list[LengthInterval], max_queues: int) -> list[LengthInterval]:
    """Merge the neighbours of the highest utility, pair by pair, until at most `max_queues` remain.

    If utilities are equal, the pair of the shorter lengths is merged.
    """
    merged = list(intervals)
    utilities = [utility(*pair) for pair in itertools.pairwise(merged)]
    while len(merged) > max_queues:
        pair = int(np.argmax(utilities))
        merged[pair : pair + 2] = [_join(merged[pair], merged[pair + 1])]
        del utilities[pair]
        for index in (pair - 1, pair):
            if 0 <= index < len(utilities):
                utilities[index] = utility(merged[index], merged[index + 1])
    return merged


def utility(lower: LengthInterval, upper: LengthInterval) -> float:
    """Return Eq 3 for two neighbours, in requests per token squared."""
    distance_tokens = abs(upper.mean_tokens - lower.mean_tokens)
    return (lower.density + upper.density) / (distance_tokens + _EPSILON_TOKENS)


def _join(lower: LengthInterval, upper: LengthInterval) -> LengthInterval:
    count = lower.count + upper.count
    mean = (lower.mean_tokens * lower.count + upper.mean_tokens * upper.count) / count
    return LengthInterval(
        min_tokens=lower.min_tokens,
        max_tokens=upper.max_tokens,
        mean_tokens=min(max(mean, lower.min_tokens), upper.max_tokens),
        count=count,
    )


_SAMPLE_WINDOWS = 4
"""Size of the sample, in windows. After a change of traffic the sample is all new once that many arrived."""
_NEW_SHARE = 0.5
"""Minimum number of new lengths for another run, in windows."""
_MIN_DISTANCE = 0.3
"""`partition_distance` at which a learned partition replaces the current one: above that between samples of
some hundred requests of the same traffic."""

ObservedLengths = Sequence[int] | npt.NDArray[np.integer]


@settings
class StrategicSettings:
    """Settings for when and how to learn queues.

    Attributes:
        window: lengths observed before the first run. A few dozen are too few for queues of 1 % each. At 500
            and 10 requests/s, the sample follows a changed mix within some minutes.
        interval_s: minimum seconds between two runs.
    """

    window: Annotated[int, at_least(2)] = 500
    interval_s: Annotated[float, FINITE_POSITIVE] = 60.0
    refine_and_prune: RefineAndPruneSettings = field(default_factory=RefineAndPruneSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChange:
    """A partition that was applied.

    Attributes:
        at: time on the clock of the caller of `due`.
        lengths: number of lengths that it was learned from.
        distance: distance from the previous partition, see `partition_distance`; infinite for the first.
    """

    partition: Partition
    at: float
    lengths: int
    distance: float


def partition_distance(first: Partition, second: Partition, lengths: ObservedLengths) -> float:
    """Return how differently two partitions treat the same prompts.

    The score of a request depends on its queue through the queue's mean length. The distance is the mean over
    prompts of |ln(mean in one / mean in the other)|: at 0.3, lengths appear about a third different.
    """
    ratios = queue_means(first, lengths) / queue_means(second, lengths)
    return float(np.abs(np.log(ratios)).mean())


def queue_means(partition: Partition, lengths: ObservedLengths) -> npt.NDArray[np.float64]:
    """Return the mean length of each prompt's queue. A prompt in a gap counts to the queue below it."""
    starts = [queue.min_tokens for queue in partition.intervals]
    means = np.array([queue.mean_tokens for queue in partition.intervals], dtype=np.float64)
    return means[np.clip(np.searchsorted(starts, lengths, side="right") - 1, 0, None)]


class StrategicLoop:
    """Loop of one model.

    Attributes:
        change: the latest change; None until there is one.
        runs: number of Refine-and-Prune runs, including those without a change.
    """

    def __init__(self, settings: StrategicSettings) -> None:
        self._settings = settings
        self._recent: deque[int] = deque(maxlen=_SAMPLE_WINDOWS * settings.window)
        self._new = 0
        self._learned_at = -math.inf
        self.change: PartitionChange | None = None
        self.runs = 0

    def __repr__(self) -> str:
        queues = len(self.change.partition) if self.change else 0
        return f"<StrategicLoop queues={queues} runs={self.runs} lengths={len(self._recent)}>"

    def observe(self, prompt_tokens: int) -> None:
        """Record the estimated length of a prompt that arrived. Values below 1 are ignored."""
        if prompt_tokens >= 1:
            self._recent.append(prompt_tokens)
            self._new += 1

    def due(self, now: float) -> Partition | None:
        """Return the partition to apply at `now`, or None for no change. Cheap if nothing is due."""
        settings = self._settings
        if self._new < settings.window * (_NEW_SHARE if self.runs else 1.0):
            return None
        if now - self._learned_at < settings.interval_s:
            return None
        lengths = tuple(self._recent)
        found = refine_and_prune(lengths, settings.refine_and_prune)
        self.runs += 1
        self._new, self._learned_at = 0, now
        distance = math.inf
        if self.change is not None:
            distance = partition_distance(found, self.change.partition, lengths)
        if distance < _MIN_DISTANCE:
            return None
        self.change = PartitionChange(partition=found, at=now, lengths=len(lengths), distance=distance)
        return found


@dataclass(frozen=True, slots=True)
class LearnedPartitions:
    """Factory of loops, one per run; a plain value that can be sent to other processes.

    Attributes:
        by_policy: settings of individual policies.
    """

    settings: StrategicSettings = field(default_factory=StrategicSettings)
    by_policy: Mapping[str, StrategicSettings] = field(default_factory=dict)

    def learner(self, policy: str = "") -> StrategicLoop:
        """Return a new loop without observations."""
        return StrategicLoop(self.by_policy.get(policy, self.settings))
