"""A replica in the simulator: the model of the emulated engine, and the reports that it makes."""

from collections.abc import Callable
from dataclasses import dataclass

from serve_app.engine_model.model import EngineModel, StepOutcome
from serve_app.engine_model.recent_mean import RecentMean
from serve_app.engine_model.sequences import EngineSequence
from serve_app.engine_model.settings import EngineModelSettings
from serve_app.engine_model.step_time import StepTimeModel
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.simulation.timeline import Rank, Timeline

# Decoding iterations that one event may cover; the model ends a step at any change.
_MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """One replica to simulate.

    Attributes:
        tells_load: its reports say what waits and runs, and it states its batch and its KV cache; otherwise
            it is like a server without metrics.
    """

    replica_id: str
    pool: str
    engine: EngineModelSettings
    step_time: StepTimeModel
    tells_load: bool = True

    @property
    def spec(self) -> ReplicaSpec:
        """What the replica registers with."""
        if not self.tells_load:
            return ReplicaSpec(
                replica_id=self.replica_id,
                pool=self.pool,
                max_model_len=self.engine.max_model_len,
                kv_tokens=None,
                max_num_seqs=None,
            )
        return ReplicaSpec(
            replica_id=self.replica_id,
            pool=self.pool,
            max_model_len=self.engine.max_model_len,
            kv_tokens=self.engine.kv_blocks * self.engine.block_size,
            max_num_seqs=self.engine.max_num_seqs,
            tpot_s=self.step_time.step_s(sequences=self.engine.max_num_seqs),
            prefill_token_s=self.step_time.prefill_per_token_s,
            max_num_batched_tokens=self.engine.max_num_batched_tokens,
            long_prefill_token_threshold=self.engine.long_prefill_token_threshold,
        )


class SimulatedReplica:
    """Drives one engine model: begins a step when there is work, and passes on the outcome of each step.

    Attributes:
        draining: it takes no more requests.
    """

    def __init__(
        self,
        plan: ReplicaPlan,
        timeline: Timeline,
        on_outcome: Callable[[StepOutcome], None],
    ) -> None:
        self.spec = plan.spec
        self.model = EngineModel(plan.engine, plan.step_time)
        self.draining = False
        self._tells_load = plan.tells_load
        self._timeline = timeline
        self._on_outcome = on_outcome
        self._received = 0
        self._tpot = RecentMean()
        self._token_gaps = 0
        self._token_gaps_s = 0.0
        self._tpot.note(0.0, 0, timeline.now)
        # The planned end of the step under way; another end in the model means that the step was cut short.
        self._planned_end: float | None = None

    def accept(self, sequence: EngineSequence) -> None:
        """Add a request that has reached the engine."""
        self._received += 1
        self.model.add(sequence, self._timeline.now)
        self._go_on()

    def abort(self, sequence: EngineSequence) -> None:
        """Abort a request whose client is gone."""
        self.model.abort(sequence, self._timeline.now)
        self._go_on()

    def report(self) -> ReplicaReport:
        """The state of the replica now."""
        if not self._tells_load:
            return ReplicaReport(
                received=None, waiting=None, running=None, kv_usage_ratio=None, draining=self.draining
            )
        snapshot = self.model.snapshot(self._timeline.now)
        return ReplicaReport(
            received=self._received,
            waiting=snapshot.waiting,
            running=snapshot.running,
            kv_usage_ratio=snapshot.kv_usage_ratio,
            tpot_s=self._tpot.mean(self._timeline.now),
            draining=self.draining,
        )

    def _go_on(self) -> None:
        now = self._timeline.now
        ends_at = self.model.ends_at
        if ends_at is None:
            ends_at = self.model.begin_step(now, max_steps=_MAX_STEPS)
        if ends_at is not None and ends_at != self._planned_end:
            self._planned_end = ends_at
            self._timeline.at(max(ends_at, now), Rank.ENGINE, lambda: self._step_ends(ends_at))

    def _step_ends(self, planned: float) -> None:
        if planned != self._planned_end:
            return
        self._planned_end = None
        outcome = self.model.end_step()
        gaps = outcome.iterations * outcome.sequences
        self._token_gaps += gaps
        self._token_gaps_s += gaps * outcome.duration_s
        self._tpot.note(self._token_gaps_s, self._token_gaps, self._timeline.now)
        self._on_outcome(outcome)
        self._go_on()
