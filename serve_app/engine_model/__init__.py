"""A model of an LLM engine: what vLLM's scheduler decides, and how long each step takes.

The emulated engine and the simulator share it. The model itself has no clock, no randomness and no I/O. Read:

- `model`: the interface of the engine (`add`, `abort`, `begin_step`, `end_step`);
- `batching`: the scheduling rules, over `waiting` (the engine's queue) and `sequences`;
- `decoding` and `kv_blocks`: how decode steps and the KV cache are kept cheap to simulate;
- `step_time`: the duration of one iteration; `settings`: the limits of an engine;
- `profiles`: named step times and limits, in `profile_data`; `roofline`, `roofline_profiles` and `hardware`:
  the profiles that are computed from data sheets;
- `capacity`: the context and the sequences that an engine can hold;
- `recent_mean`: the mean TPOT over the last seconds, for reports of an engine's load.
"""

from serve_app.engine_model.model import EngineModel, ModelSnapshot, StepOutcome
from serve_app.engine_model.sequences import EngineSequence, SequenceState
from serve_app.engine_model.settings import EngineModelSettings
from serve_app.engine_model.waiting import SchedulingPolicy

__all__ = [
    "EngineModel",
    "EngineModelSettings",
    "EngineSequence",
    "ModelSnapshot",
    "SchedulingPolicy",
    "SequenceState",
    "StepOutcome",
]
