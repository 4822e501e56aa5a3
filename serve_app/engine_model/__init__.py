"""A pure model of an LLM engine, shared by the `emulated` engine and the simulator.

It knows what vLLM's scheduler decides and what a step costs; it has no clock, no randomness and no I/O. Read
`model.py` (the door: add, abort, begin_step, end_step), then `batching.py` (the rules), then `decoding.py`
and `kv_blocks.py` (how they are kept cheap), `waiting.py`, `sequences.py`, `settings.py`.
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
