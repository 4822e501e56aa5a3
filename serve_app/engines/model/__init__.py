"""Model of an LLM engine: vLLM's scheduling decisions and the duration of each step.

The emulated engine and the simulator share it. The model has no clock, no randomness and no I/O.

- `model`: the interface of the engine (`add`, `abort`, `begin_step`, `end_step`), limits, sequences and KV
  blocks, the scheduling rules, and the set of decoding sequences that keeps simulation cheap.
- `step_time`: the duration of one iteration.
- `roofline` and `hardware`: named profiles, stored in `profile_data`, and those computed from data sheets
  (written by `scripts/roofline_profiles.py`).
"""

from serve_app.engines.model.model import (
    EngineModel,
    EngineModelSettings,
    EngineSequence,
    ModelSnapshot,
    SchedulingPolicy,
    SequenceState,
    StepOutcome,
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
