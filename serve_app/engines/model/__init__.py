"""Model of an LLM engine: vLLM's scheduling decisions and the duration of each step.

The emulated engine and the simulator share it. The model has no clock, no randomness and no I/O.

- `model`: the interface of the engine (`add`, `abort`, `begin_step`, `end_step`).
- `batching`: the scheduling rules, and the set of decoding sequences that keeps simulation cheap.
- `sequences`: limits, sequences, waiting queue and KV blocks.
- `step_time`: the duration of one iteration.
- `profiles`: named step times and limits, stored in `profile_data`.
- `roofline` and `hardware`: profiles computed from data sheets (written by `scripts/roofline_profiles.py`),
  and the capacity of an engine.
- `recent_mean`: mean TPOT over the last seconds, for load reports.
"""

from serve_app.engines.model.model import EngineModel, ModelSnapshot, StepOutcome
from serve_app.engines.model.sequences import (
    EngineModelSettings,
    EngineSequence,
    SchedulingPolicy,
    SequenceState,
)

__all__ = [
    "EngineModel",
    "EngineModelSettings",
    "EngineSequence",
    "ModelSnapshot",
    "SchedulingPolicy",
    "SequenceState",
    "StepOutcome",
]
