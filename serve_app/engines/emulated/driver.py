"""Real-time driver of the engine model: begins a step, sleeps until it ends, and delivers its tokens.

The model's clock runs `speed_up` times as fast as wall time. A step begins when the previous one ended on
that clock, not when this process woke up, so late wake-ups do not accumulate. If the process lags too far
behind, the clock slips instead of catching up in a burst.

Request handlers hold a `Ticket`. The driver marks tickets with progress and wakes their handlers. A handler
that reads slowly finds several tokens at once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from serve_app.engines.emulated.metrics import EngineMetrics
from serve_app.engines.emulated.text import GeneratedOutput
from serve_app.engines.engine import EngineLoad
from serve_app.engines.model import EngineModel, EngineSequence, ModelSnapshot, StepOutcome
from serve_app.engines.model.recent_mean import TPOT_WINDOW_S, RecentMean
from serve_app.errors import EngineError

_log = logging.getLogger(__name__)

# Maximum lag, in wall time, that is caught up. Beyond it, the engine is slower than its profile.
_MAX_LAG_S = 0.1


class Ticket:
    """The sequences of one HTTP request, and the event on which its handler waits.

    Attributes:
        sequences: one per choice, in order.
        outputs: answer of each sequence; empty if none is generated.
        streaming: wake the handler at every token, not only at the end.
        abandoned: whether the client has disconnected.
    """

    __slots__ = (
        "_failure",
        "_progressed",
        "_unfinished",
        "_waiter",
        "abandoned",
        "outputs",
        "sequences",
        "streaming",
    )

    def __init__(
        self,
        sequences: Sequence[EngineSequence],
        outputs: Sequence[GeneratedOutput] = (),
        *,
        streaming: bool = False,
    ) -> None:
        self.sequences = sequences
        self.outputs = outputs
        self.streaming = streaming
        self.abandoned = False
        self._unfinished = len(sequences)
        self._failure: Exception | None = None
        self._progressed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """True if all sequences have finished."""
        return self._unfinished == 0

    async def progress(self) -> None:
        """Wait for new tokens of a stream, the end, or a disconnected client.

        Raises:
            EngineError: the engine has stopped.
        """
        if not self._progressed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._progressed = False
        if self._failure is not None:
            raise EngineError("the emulated engine has stopped") from self._failure

    def notify(self) -> None:
        """Notify the handler of progress."""
        self._progressed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def count_finished(self) -> None:
        """Count one more finished sequence."""
        self._unfinished -= 1
        if self.streaming or not self._unfinished:
            self.notify()

    def abandon(self) -> None:
        """Stop the handler, because its client has disconnected."""
        self.abandoned = True
        self.notify()

    def fail(self, failure: Exception) -> None:
        """Raise an error in the handler, because the engine has stopped."""
        self._failure = failure
        self.notify()


class EngineDriver:
    """Owner of the engine model and its clock.

    Args:
        metrics: counters of steps.
        speed_up: seconds of the model's clock per second of wall time.
    """

    def __init__(self, model: EngineModel, metrics: EngineMetrics, speed_up: float) -> None:
        self._model = model
        self._metrics = metrics
        self._speed_up = speed_up
        self._tickets: dict[EngineSequence, Ticket] = {}
        self._work = asyncio.Event()
        self._token_gaps = 0
        self._token_gaps_s = 0.0
        self._tpot = RecentMean(TPOT_WINDOW_S)
        self._task: asyncio.Task[None] | None = None
        self._clock: Callable[[], float] | None = None
        self._started_at = 0.0

    def __repr__(self) -> str:
        return f"<EngineDriver open={len(self._tickets)} {self._model!r}>"

    def start(self) -> None:
        """Start the task. Requires a running event loop."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._started_at = loop.time()
        self._tpot.record(0.0, 0, loop.time())
        self._task = loop.create_task(self._run(), name="emulated-engine")

    async def stop(self) -> None:
        """Stop the task and fail unfinished requests."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(EngineError("the engine was stopped"))

    def check(self) -> None:
        """Raise `EngineError` if the task is not running."""
        if self._task is None:
            raise EngineError("the emulated engine has not been started")
        if self._task.done():
            raise EngineError("the emulated engine has stopped")

    def now(self) -> float:
        """Return the time on the model's clock in seconds."""
        assert self._clock is not None, "the driver has not been started"
        return (self._clock() - self._started_at) * self._speed_up

    def submit(self, ticket: Ticket) -> None:
        """Add a ticket's sequences to the engine.

        Raises:
            EngineError: the engine has stopped.
        """
        self.check()
        now = self.now()
        for sequence in ticket.sequences:
            self._tickets[sequence] = ticket
            self._model.add(sequence, now)
        self._work.set()

    def close(self, ticket: Ticket) -> None:
        """Abort the unfinished sequences of a ticket. Idempotent; allowed at any time."""
        for sequence in ticket.sequences:
            if self._tickets.pop(sequence, None) is not None:
                self._model.abort(sequence, self.now())

    def output_tokens(self, sequence: EngineSequence) -> int:
        """Return the number of tokens that a sequence has generated so far."""
        return self._model.output_tokens(sequence)

    def snapshot(self) -> ModelSnapshot:
        """Return the engine's current counts."""
        return self._model.snapshot(self.now())

    def load(self) -> EngineLoad:
        """Return the engine's load; `tpot_s` is wall time, so a speed-up divides it."""
        assert self._clock is not None, "the driver has not been started"
        snapshot = self.snapshot()
        return EngineLoad(
            waiting=snapshot.waiting,
            running=snapshot.running,
            kv_usage_ratio=snapshot.kv_usage_ratio,
            tpot_s=self._tpot.mean(self._clock()),
        )

    async def _run(self) -> None:
        try:
            await self._run_steps()
        except Exception as error:
            _log.exception("the emulated engine has stopped: %r", self)
            self._fail_all(error)
            raise

    async def _run_steps(self) -> None:
        begin_at = self.now()
        began_at = begin_at
        while True:
            ends_at = self._model.begin_step(begin_at)
            if ends_at is None:
                self._work.clear()
                await self._work.wait()
                begin_at = began_at = self.now()
                continue
            # Even a sleep of zero seconds lets the handlers run between steps.
            await asyncio.sleep(max(0.0, (ends_at - self.now()) / self._speed_up))
            outcome = self._model.end_step()
            woke_at = self.now()
            self._deliver(outcome, (woke_at - began_at) / self._speed_up)
            began_at = woke_at
            begin_at = max(ends_at, woke_at - _MAX_LAG_S * self._speed_up)

    def _deliver(self, outcome: StepOutcome, gap_s: float) -> None:
        """Wake the handlers of sequences with a new token, `gap_s` of wall time after their previous one."""
        assert self._clock is not None, "the driver has not been started"
        self._token_gaps += outcome.sequences
        self._token_gaps_s += outcome.sequences * gap_s
        self._tpot.record(self._token_gaps_s, self._token_gaps, self._clock())
        self._metrics.count_step(outcome, gap_s)
        tickets = self._tickets
        for sequence in self._model.decoding:
            ticket = tickets[sequence]
            if ticket.streaming:
                ticket.notify()
        for sequence in outcome.finished:
            tickets.pop(sequence).count_finished()

    def _fail_all(self, error: Exception) -> None:
        for ticket in set(self._tickets.values()):
            ticket.fail(error)
        self._tickets.clear()
