"""Limits of an engine that reports neither its queue nor its batch size, learned from the starts of answers.

The queue of such an engine is hidden, and requests in it can no longer be reordered. Streamed answers show
their start, so the requests without a first token bound the hidden queue. Their limit is a *window*:

- An answer that starts in time while the window is used widens it. The window grows by half per round trip,
  so a burst fills an engine within a few. It no longer grows once starts take `_FAST_S`.
- An answer is *late* if it took longer to start than the engine needs for all prompt tokens that were in
  flight with it, at the learned cost of a prefill. An overtaken request does not count: engines begin
  requests in order, so the engine was computing its prompt.
- `_LATE_IN_A_ROW` late answers in a row show that the engine was *full*. The window becomes
  `_LEAST_WINDOW`, and the sequences and KV tokens in use are an observation of its capacity.

The observations tell which resource was exhausted: the one whose use was the same each time.

- The batch: its size is the most sequences that ran together in them, and it limits the requests in flight
  as a reported one does. It is raised as soon as more run.
- The KV cache: its size is the least use in them. It is the budget of the ledger, as a reported size is. It
  grows slowly while it is used and answers start in time, and faster after each turnover of the batch.

An answer that is not streamed starts at its end. These have a window of their own (AIMD). An end in time
widens it by one, or by `_SLOW_INCREASE` after the first late one. A late end sets it to `_DECREASE_RATIO`
of the requests in flight. *Late* is more than `_LATE_FACTOR` times the lower quartile of answers with as
many tokens, plus `_LATE_SLACK_S`.

Sources: growth per round trip until the first sign of a queue, as slow start (Jacobson 1988). Delay beyond
that of an empty queue as the sign, as TCP Vegas (Brakmo and Peterson 1995). A capacity from what was in
flight when the queue appeared, as BBR (Cardwell et al. 2016). AIMD on latency, as `AIMDLimit` of Netflix's
concurrency-limits.
"""

from collections import deque
from dataclasses import dataclass

_NEVER = float("-inf")
# Share of a limit in use from which it counts as used.
_USED_RATIO = 0.8
# The window of an engine that is full, or whose size is unknown: it may be a laptop. As `target_waiting`.
_LEAST_WINDOW = 3.0
_WIDENING = 0.5
# A start that takes longer gives the engine no more work by a wider window, only a longer queue.
_FAST_S = 0.25
# A start is late if it took longer than is explained, by an iteration and this much for the round trip.
_ROUND_TRIP_S, _USUAL_ITERATION_S = 0.05, 0.05
_LATE_IN_A_ROW = 2
# Observations of a full engine that are kept, and the share by which a resource's uses may differ.
_CAPACITIES, _AGREEMENT = 8, 0.8
# Growth of the learned KV size per turnover of the batch. It doubles with each turnover without a late start.
_KV_GROWTH = 0.005

# Answers that are not streamed.
_FIRST_UNSTREAMED = 8.0
_MAX_OBSERVATIONS, _MIN_OBSERVATIONS = 32, 4
_LATE_FACTOR, _LATE_SLACK_S, _DECREASE_RATIO = 2.0, 0.25, 0.9
# Growth per answer after the first late one: their times are too coarse to find a limit quickly.
_SLOW_INCREASE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStart:
    """The start of one streamed answer.

    Attributes:
        seconds: time since its dispatch.
        explained_s: time to compute all prompt tokens that were in flight with it.
        iteration_s: time per iteration of the engine; None if unknown.
        overtaken: whether the answer of a request that was sent later has started before.
        running: requests in the engine whose answer has started, this one included.
        unstarted: streamed requests whose answer has not started, this one included.
        peak_tokens: forecast peak of the KV cache by the requests in the engine.
    """

    seconds: float
    explained_s: float
    iteration_s: float | None
    overtaken: bool
    running: int
    unstarted: int
    peak_tokens: int

    @property
    def is_late(self) -> bool:
        """True if it took clearly longer than the prompt tokens in flight explain."""
        iteration_s = self.iteration_s or _USUAL_ITERATION_S
        return self.seconds > self.explained_s + iteration_s + _ROUND_TRIP_S


class ObservedLimits:
    """The learned limits of one engine.

    Attributes:
        window: limit of streamed requests whose answer has not started.
        unstreamed: limit of other requests in flight.
        batch: sequences that fill the batch; None while unknown.
        kv_tokens: size of the KV cache; None while unknown.
        most_running: the most sequences that have run at once.
    """

    def __init__(self) -> None:
        self.window = _LEAST_WINDOW
        self.unstreamed = _FIRST_UNSTREAMED
        self.batch: int | None = None
        self.kv_tokens: float | None = None
        self.most_running = 0
        self._late_in_a_row = 0
        self._full_at = _NEVER
        self._capacities: deque[tuple[int, int]] = deque(maxlen=_CAPACITIES)
        self._kv_growth, self._starts = _KV_GROWTH, 0
        self._usual: dict[int, deque[float]] = {}
        self._decreased_at = _NEVER

    def __repr__(self) -> str:
        return f"<ObservedLimits window={self.window:.1f} batch={self.batch} kv_tokens={self.kv_tokens}>"

    def on_start(self, start: AnswerStart, now: float) -> bool:
        """Learn from the start of a streamed answer. Return whether it shows a full engine: see `on_full`."""
        self.most_running = max(self.most_running, start.running)
        if self.batch is not None:
            self.batch = max(self.batch, start.running)
        if start.is_late:
            self._late_in_a_row += not start.overtaken
            # Requests sent before the last observation waited for the same capacity.
            return self._late_in_a_row >= _LATE_IN_A_ROW and now - start.seconds > self._full_at
        self._late_in_a_row = 0
        if start.seconds < _FAST_S and start.unstarted >= min(_USED_RATIO * self.window, int(self.window)):
            self.window += _WIDENING
        if self.kv_tokens is not None and start.peak_tokens >= _USED_RATIO * self.kv_tokens:
            self._grow_kv(self.kv_tokens, start.running)
        return False

    def on_full(self, running: int, used_tokens: int, now: float) -> None:
        """Observe the capacity of a full engine: its running sequences and their tokens in the KV cache."""
        self.window, self._full_at = _LEAST_WINDOW, now
        self._kv_growth, self._starts = _KV_GROWTH, 0
        self._capacities.append((running, used_tokens))
        sequences, tokens = zip(*self._capacities, strict=True)
        # Two starts in one iteration differ by one sequence.
        same_sequences = (min(sequences) + 1) / (max(sequences) + 1)
        same_tokens = min(tokens) / max(*tokens, 1)
        if len(tokens) > 1 and same_tokens > max(same_sequences, _AGREEMENT):
            self.batch, self.kv_tokens = None, float(min(tokens))
        else:
            self.batch = max(sequences) if same_sequences >= _AGREEMENT else running
            self.kv_tokens = None

    def _grow_kv(self, kv_tokens: float, running: int) -> None:
        self.kv_tokens = kv_tokens * (1 + self._kv_growth / running)
        self._starts += 1
        if self._starts >= running:
            self._kv_growth, self._starts = min(1.0, 2 * self._kv_growth), 0

    def on_whole_answer(self, tokens: int, seconds: float, now: float, *, in_flight: int) -> None:
        """Learn from an answer that was not streamed.

        Args:
            tokens: prompt and output tokens, weighted by their time.
            seconds: time since its dispatch.
            in_flight: requests in the engine that are not streamed, this one included.
        """
        if self._is_late(tokens, seconds):
            # A request sent before the last decrease waited behind requests that the limit no longer allows.
            if now - seconds > self._decreased_at:
                self.unstreamed = max(1.0, _DECREASE_RATIO * min(self.unstreamed, in_flight))
                self._decreased_at = now
        elif in_flight >= min(_USED_RATIO * self.unstreamed, int(self.unstreamed)):
            self.unstreamed += 1.0 if self._decreased_at == _NEVER else _SLOW_INCREASE

    def _is_late(self, tokens: int, seconds: float) -> bool:
        """Return whether an answer took longer than usual, before it is added to the observations."""
        seen = self._usual.setdefault(max(tokens, 1).bit_length(), deque(maxlen=_MAX_OBSERVATIONS))
        usual_s = sorted(seen)[len(seen) // 4] if len(seen) >= _MIN_OBSERVATIONS else float("inf")
        seen.append(seconds)
        return seconds > _LATE_FACTOR * usual_s + _LATE_SLACK_S
