"""An oracle that serves a batch beside interactive requests, which no gateway could.

It sees each iteration of the engine before it begins, and computes prompts of the batch in chunks of its
choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from serve_app.core import SchedulerSettings
from serve_app.engines.model.model import EngineSequence, SequenceState, StepOutcome
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedReplica, Simulation


@dataclass(slots=True)
class BatchRequest:
    """A request of the batch.

    Attributes:
        computed_tokens: tokens of its prompt that are in the prefix cache.
    """

    number: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int = 0


class OracleSimulation(Simulation):
    """Interactive requests under the production scheduler, and a batch that the oracle adds to one engine.

    An iteration takes at most `1 + slowdown` times as long as it would without the batch. Within that, as
    many requests of the batch run as possible. Their prompts are computed in the tokens that an iteration
    computes while it reads the weights, beside those of interactive prefills. So they lengthen none.

    The scheduler does not know of the batch. A chunk is an engine request without an answer, whose blocks the
    next one finds in the prefix cache.

    Args:
        lengths: draws prompt and output tokens of the batch's next request.
        slowdown: share by which the batch may lengthen an iteration.
        until: time of the last new request of the batch.

    Attributes:
        ended: end and output tokens of each request of the batch.
    """

    def __init__(
        self,
        scheduler: SchedulerSettings,
        plan: ReplicaPlan,
        *,
        lengths: Callable[[], tuple[int, int]],
        slowdown: float,
        until: float,
    ) -> None:
        super().__init__(scheduler, [plan])
        self.ended: list[tuple[float, int]] = []
        self._replica_id, self._slowdown, self._until = plan.replica_id, slowdown, until
        self._step_time, self._block_size = plan.step_time, plan.engine.block_size
        self._most = plan.engine.max_num_seqs
        # The cost of one more request in an iteration.
        self._each_s = (
            plan.step_time.decode_per_sequence_s
            + plan.step_time.decode_per_context_token_s * _USUAL_CONTEXT_TOKENS
        )
        # An iteration computes this many prompt tokens while it reads the weights.
        self._free_tokens = int(self._step_time.decode_base_s / self._step_time.prefill_per_token_s)
        self._lengths, self._drawn = lengths, 0
        self._prefilling: list[BatchRequest] = []
        self._on_engine: dict[EngineSequence, BatchRequest] = {}

    def _step_ended(self, outcome: StepOutcome) -> None:
        for sequence in outcome.finished:
            request = self._on_engine.pop(sequence, None)
            if request is not None and sequence.target_tokens:
                self.ended.append((outcome.ended_at, request.output_tokens))
        super()._step_ended(
            replace(
                outcome,
                first_tokens=[one for one in outcome.first_tokens if not _is_batch(one)],
                finished=[one for one in outcome.finished if not _is_batch(one)],
            )
        )
        self._fill(self.replicas[self._replica_id])

    def _fill(self, replica: SimulatedReplica) -> None:
        """Add requests and chunks for the next iteration."""
        others = [one.sequence for one in self._live.values() if one.sequence is not None]
        decoding = [one for one in others if one.state is SequenceState.DECODING]
        threshold = (
            replica.model.settings.long_prefill_token_threshold or replica.model.settings.max_model_len
        )
        pending = sum(
            min(threshold, one.prompt_tokens - one.computed_tokens)
            for one in others
            if one.state in {SequenceState.WAITING, SequenceState.PREFILLING}
        )
        mine = [*self._on_engine]
        limit_s = (1.0 + self._slowdown) * self._decode_s(replica, decoding)
        spare_s = limit_s - self._decode_s(replica, [*decoding, *mine])
        places = min(int(spare_s / self._each_s), self._most - len(decoding) - len(mine))
        while self.timeline.now < self._until and len(self._prefilling) < max(0, places) + _AHEAD:
            self._drawn += 1
            self._prefilling.append(BatchRequest(self._drawn, *self._lengths()))
        self._compute(replica, self._free_tokens - pending, places)

    def _compute(self, replica: SimulatedReplica, room: int, places: int) -> None:
        """Add the next chunks of at most `room` tokens together, in the order of their requests.

        Args:
            places: number of requests whose prompts may be completed.
        """
        threshold = replica.model.settings.long_prefill_token_threshold
        left = []
        for request in self._prefilling:
            rest = request.prompt_tokens - request.computed_tokens
            chunk = min(room, threshold or rest)
            if chunk >= rest and places > 0:
                self._add(replica, request, request.prompt_tokens, request.output_tokens)
                room -= rest
                places -= 1
                continue
            left.append(request)
            # Only whole blocks are found again, and the last token is computed with the first of the answer.
            if blocks := min(request.computed_tokens + chunk, request.prompt_tokens - 1) // self._block_size:
                computed = blocks * self._block_size
                if computed > request.computed_tokens:
                    self._add(replica, request, computed, 0)
                    room -= computed - request.computed_tokens
                    request.computed_tokens = computed
        self._prefilling = left

    def _add(
        self, replica: SimulatedReplica, request: BatchRequest, prompt_tokens: int, output_tokens: int
    ) -> None:
        blocks = prompt_tokens // self._block_size
        sequence = EngineSequence(
            f"{_PREFIX}{request.number}/{prompt_tokens}",
            prompt_tokens,
            output_tokens,
            self.timeline.now,
            block_hashes=tuple(hash((request.number, block)) for block in range(blocks)),
        )
        self._on_engine[sequence] = request
        replica.model.add(sequence, self.timeline.now)

    def _decode_s(self, replica: SimulatedReplica, sequences: Sequence[EngineSequence]) -> float:
        model = replica.model
        context = sum(one.prompt_tokens + model.output_tokens(one) for one in sequences)
        return max(
            self._step_time.step_s(sequences=len(sequences), context_tokens=context),
            self._step_time.decode_base_s,
        )


# Prefix of the names of the batch's engine requests.
_PREFIX = "batch-"
# Of a request of the batch, for the cost of one more.
_USUAL_CONTEXT_TOKENS = 1_200
# Prompts that are computed before a place is free for them.
_AHEAD = 4


def _is_batch(sequence: EngineSequence) -> bool:
    return sequence.sequence_id.startswith(_PREFIX)
