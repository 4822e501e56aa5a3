"""A model of an LLM engine: what vLLM's scheduler decides, and how long each step takes.

The emulated engine and the simulator share it. The model itself has no clock, no randomness and no I/O. Read:

- `model`: the interface of the engine (`add`, `abort`, `begin_step`, `end_step`);
- `batching`: the scheduling rules, and how decode steps are kept cheap to simulate;
- `sequences`: the limits of an engine, its sequences, its queue and its KV blocks;
- `step_time`: the duration of one iteration;
- `profiles`: named step times and limits, in `profile_data`; `roofline` and `hardware`: the profiles that are
  computed from data sheets, which `scripts/roofline_profiles.py` writes, and what an engine can hold;
- `recent_mean`: the mean TPOT over the last seconds, for reports of an engine's load.
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
