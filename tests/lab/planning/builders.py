"""Small mixes, engines and demands for planning tests."""

import numpy as np

from serve_app.core.metrics.summary import Slo
from serve_app.engines.model.model import EngineModelSettings
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.planning.queueing import LengthMix, PoolModel
from serve_app.lab.planning.verification import Workload
from serve_app.lab.workloads import TraceChoice
from tests.lab.simulation.builders import STEP_TIME


def mix(*lengths: tuple[int, int]) -> LengthMix:
    prompts, outputs = zip(*lengths, strict=True)
    return LengthMix(np.array(prompts, dtype=np.int64), np.array(outputs, dtype=np.int64))


def pool_model(
    lengths: LengthMix,
    *,
    step_time: StepTimeModel = STEP_TIME,
    max_num_seqs: int = 64,
    kv_tokens: int = 400_000,
    chunk: int = 0,
) -> PoolModel:
    engine = EngineModelSettings(
        max_model_len=16_384,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=chunk,
    )
    return PoolModel(step_time, engine, lengths)


def demand(
    rate_per_s: float, *, requests: int = 400, ttft_s: float = 1.0, tpot_s: float | None = None
) -> Workload:
    """Return a demand with the paper's mix, for a laptop's profile."""
    return Workload(
        trace=TraceChoice(name="paper-mix", requests=requests, arrivals="poisson"),
        rate_per_s=rate_per_s,
        slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        policy="fcfs",
    )
