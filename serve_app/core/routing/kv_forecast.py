"""Forecast of the KV cache that the running requests of a replica will use at most.

Each running request grows by one token per iteration until its answer ends, and then frees all its blocks.
So the use of the cache has its peak at the end of some answer, when the others have grown and few have
ended. Holding each request's *final* size instead would leave unused what its answer has not reached yet,
and holding its current size would preempt.

The length of an answer is a distribution, of which `OutputEstimate.ends` gives some equally likely points. A
point weighs its share of the request:

    use(c) = sum over the points at or after c of  weight * (prompt + choices * (c - start))
    peak = max over the points c of use(c)

where `c` counts iterations of the replica. An answer that outlives a point counts at its later ones, and
after the last one at new points, those of answers of at least its age. `spread` is the standard deviation of
the sum of all final sizes, from which the ledger takes its margin: it is large if nothing is known, and 0 if
the lengths are known.

Requests with a common prefix use its blocks together. So what the engine reports less than the sum, at most
the prefixes that were cached, is subtracted.

Source: the peak of future memory of Past-Future scheduling (Gong et al., ASPLOS 2025), which samples one
length per request. The points instead of samples, and the margin, are ours.
"""

import bisect
import math

from serve_app.core.routing.estimation.estimate import TokenEstimate

# Points are rounded to an eighth of the distance, so that a replica has few different ones.
_STEPS_PER_LENGTH = 8
# A point is at least this many iterations away, so that an answer at its limit is not moved at each of them.
_NEAREST = 8.0
# A sequence leaves half of its last block unused, on average.
_HALF_BLOCK = 8


class KvUse:
    """The expected use of the KV cache by one running request.

    Attributes:
        pool: the pool of its replica when it was dispatched.
        start: iteration of the replica at which its answer began.
        points: iterations at which it may end, with the probability of each.
        variance: variance of its final size, in tokens squared.
        cached_tokens: prompt tokens that its replica had cached at its dispatch.
        started: whether its answer has started.
    """

    __slots__ = (
        "cached_tokens",
        "choices",
        "estimate",
        "points",
        "pool",
        "prompt_tokens",
        "start",
        "started",
        "variance",
    )

    def __init__(self, estimate: TokenEstimate, choices: int, pool: str, cached_tokens: int = 0) -> None:
        self.estimate = estimate
        self.pool = pool
        self.cached_tokens = cached_tokens
        self.started = False
        self.prompt_tokens = estimate.expected_prompt_tokens + _HALF_BLOCK * choices
        self.choices = choices
        self.start = 0.0
        self.points: dict[int, float] = {}
        self.variance = 0.0

    def __repr__(self) -> str:
        return (
            f"<KvUse {self.prompt_tokens} + {self.choices} * (clock - {self.start:.0f}), ends {self.points}>"
        )


class KvForecast:
    """The expected use of one replica's KV cache.

    It is `active` only while the cache may fill up. Otherwise it records when answers began, which costs next
    to nothing.

    Attributes:
        clock: iterations of the replica since it joined.
    """

    __slots__ = ("_base", "_members", "_points", "_slope", "_uses", "_variance", "active", "clock")

    def __init__(self) -> None:
        self.clock = 0.0
        self.active = False
        self._uses: dict[KvUse, None] = {}
        self._points: list[int] = []
        # By point: the weighted sum of choices, and of what the prompts would use at iteration 0.
        self._slope: dict[int, float] = {}
        self._base: dict[int, float] = {}
        self._members: dict[int, dict[KvUse, None]] = {}
        self._variance = 0.0

    def __repr__(self) -> str:
        return f"<KvForecast of {len(self._uses)} clock={self.clock:.0f} peak={self.peak()}>"

    @property
    def spread(self) -> float:
        """Standard deviation of the sum of all final sizes, in tokens."""
        return math.sqrt(max(0.0, self._variance))

    def activate(self) -> None:
        """Compute the points of all running requests from now on."""
        if not self.active:
            self.active = True
            for use in self._uses:
                self._insert(use)

    def deactivate(self) -> None:
        """Drop all points."""
        if self.active:
            self.active = False
            for use in self._uses:
                use.points = {}
            self._points = []
            self._slope, self._base, self._members, self._variance = {}, {}, {}, 0.0

    def add(self, use: KvUse) -> None:
        """Add a request whose answer begins now."""
        use.start = self.clock
        self._uses[use] = None
        if self.active:
            self._insert(use)

    def remove(self, use: KvUse) -> None:
        """Remove a request that has ended."""
        del self._uses[use]
        base = use.prompt_tokens - use.choices * use.start
        for point, weight in use.points.items():
            members = self._members[point]
            del members[use]
            if members:
                self._slope[point] -= weight * use.choices
                self._base[point] -= weight * base
            else:
                del self._members[point], self._slope[point], self._base[point]
                del self._points[bisect.bisect_left(self._points, point)]
        # Rounding errors do not outlast a time without requests.
        self._variance = self._variance - use.variance if self._points else 0.0
        use.points, use.variance = {}, 0.0

    def advance(self, iterations: float) -> None:
        """Move the clock. The share of a passed point goes to the later points of its request."""
        self.clock += iterations
        while self._points and self._points[0] <= self.clock:
            passed = self._points.pop(0)
            del self._slope[passed], self._base[passed]
            for use in self._members.pop(passed):
                weight = use.points.pop(passed)
                if not use.points:
                    self._variance -= use.variance
                    self._insert(use)
                    continue
                share = weight / len(use.points)
                slope, base = share * use.choices, share * (use.prompt_tokens - use.choices * use.start)
                for point in use.points:
                    use.points[point] += share
                    self._slope[point] += slope
                    self._base[point] += base

    def used(self) -> int:
        """Return the use of the cache now, in tokens. It takes time in proportion to the requests."""
        return round(sum(use.prompt_tokens + use.choices * (self.clock - use.start) for use in self._uses))

    def shared(self, reported_tokens: int) -> int:
        """Return the tokens that count more than once here, because requests share a prefix.

        Args:
            reported_tokens: the use of the cache as the engine reports it.
        """
        started = [use for use in self._uses if use.started]
        used = sum(use.prompt_tokens + use.choices * (self.clock - use.start) for use in started)
        return max(0, min(sum(use.cached_tokens for use in started), round(used) - reported_tokens))

    def peak(self) -> int:
        """Return the highest expected use from now on, in tokens."""
        slope = base = highest = 0.0
        slopes, bases = self._slope, self._base
        for point in reversed(self._points):
            slope += slopes[point]
            base += bases[point]
            use = base + slope * point
            highest = max(highest, use)
        return math.ceil(highest)

    def _insert(self, use: KvUse) -> None:
        output = use.estimate.output
        # The clock is an estimate. No answer is longer than its limit.
        age = min(self.clock - use.start, output.longest)
        use.start = self.clock - age
        ends = output.ends(age)
        weight = 1.0 / len(ends)
        mean = weight * sum(ends)
        use.variance = use.choices * weight * sum((end - mean) ** 2 for end in ends)
        self._variance += use.variance
        use.points = {}
        for end in ends:
            point = _rounded(use.start + end, self.clock)
            use.points[point] = use.points.get(point, 0.0) + weight
        base = use.prompt_tokens - use.choices * use.start
        for point, share in use.points.items():
            if point not in self._members:
                self._members[point] = {}
                self._slope[point] = self._base[point] = 0.0
                bisect.insort(self._points, point)
            self._members[point][use] = None
            self._slope[point] += share * use.choices
            self._base[point] += share * base


def _rounded(at: float, clock: float) -> int:
    """Return an iteration after `clock`, rounded relative to its distance."""
    distance = max(_NEAREST, at - clock)
    step = 1 << max(0, int(distance / _STEPS_PER_LENGTH).bit_length() - 1)
    point = round((clock + distance) / step) * step
    return point if point > clock else point + step
