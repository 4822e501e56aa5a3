"""Small fleets and requests for simulation tests."""

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from serve_app.engines.model.model import EngineModelSettings
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest
from serve_app.request import ProgramHint, TurnEnd
from tests.builders import request

STEP_TIME = StepTimeModel(
    decode_base_s=0.02, decode_per_sequence_s=0.0004, prefill_base_s=0.004, prefill_per_token_s=0.0001
)


def plan(
    replica_id: str,
    pool: str,
    *,
    max_model_len: int = 2_000,
    kv_tokens: int = 8_000,
    max_num_seqs: int = 16,
) -> ReplicaPlan:
    engine = EngineModelSettings(
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
    )
    return ReplicaPlan(replica_id=replica_id, pool=pool, engine=engine, step_time=STEP_TIME)


def simulated(
    request_id: str,
    *,
    prompt_tokens: int = 160,
    output_tokens: int = 10,
    at: float = 0.0,
    blocks: Sequence[int] = (),
    session: str | None = None,
    bound_to: str | None = None,
    ending: TurnEnd | None = None,
) -> SimulatedRequest:
    """Return a request of exact lengths."""
    made = request(request_id, text_bytes=0, prompt_tokens=prompt_tokens, arrived_at=at, bound_to=bound_to)
    program = None if session is None else ProgramHint(session=session)
    return SimulatedRequest(
        replace(made, submission=msgspec.structs.replace(made.submission, program=program)),
        output_tokens=output_tokens,
        block_hashes=blocks,
        ending=ending,
    )


def mixed_requests(
    count: int, *, rate_per_s: float, seed: int, timeout_s: float = 300.0
) -> list[SimulatedRequest]:
    """Return mostly short, some long requests: exact lengths, Poisson arrivals."""
    rng = random.Random(seed)
    now, requests = 0.0, []
    for number in range(count):
        now += rng.expovariate(rate_per_s)
        prompt = rng.randint(16, 200) if rng.random() < 0.8 else rng.randint(600, 3_000)
        requests.append(
            SimulatedRequest(
                request(
                    f"r{number}",
                    text_bytes=0,
                    prompt_tokens=prompt,
                    max_output_tokens=100,
                    tenant="default",
                    arrived_at=now,
                    expires_at=now + timeout_s,
                ),
                output_tokens=rng.randint(1, 100),
            )
        )
    return requests
