"""Measurements made with the engine model itself, so that the truth is known."""

import json
from pathlib import Path

import numpy as np

from serve_app.engines.model import EngineModel, EngineModelSettings, EngineSequence
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.calibration.measurements import MeasuredRequest

LIMITS = EngineModelSettings(kv_tokens=20_000, max_model_len=4_096)
TRUTH = StepTimeModel(
    decode_base_s=0.02,
    decode_per_sequence_s=1e-4,
    decode_per_context_token_s=1.5e-7,
    prefill_base_s=0.01,
    prefill_per_token_s=9e-5,
    prefill_per_pair_s=2e-9,
)


def measured_request(**changes: float) -> MeasuredRequest:
    values: dict[str, float] = {
        "prompt_tokens": 100,
        "output_tokens": 11,
        "queued_at": 10.0,
        "scheduled_at": 10.0,
        "first_token_at": 10.5,
        "last_token_at": 11.5,
    }
    return MeasuredRequest(**(values | changes))  # type: ignore[arg-type]


def engine_run(count: int, *, per_s: float, seed: int = 1, origin: float = 27_000.0) -> list[MeasuredRequest]:
    """Poisson arrivals at an engine with the step times `TRUTH`, one step at a time."""
    rng = np.random.default_rng(seed)
    arrivals = rng.exponential(1 / per_s, count).cumsum()
    prompts, outputs = rng.integers(30, 3_000, count), rng.integers(1, 500, count)
    sequences = [
        EngineSequence(str(number), int(prompts[number]), int(outputs[number]), float(arrived_at))
        for number, arrived_at in enumerate(arrivals)
    ]
    model, coming, now = EngineModel(LIMITS, TRUTH), list(reversed(sequences)), 0.0
    while coming or model.has_work:
        if not model.has_work:
            now = coming[-1].arrived_at
        while coming and coming[-1].arrived_at <= now:
            model.add(coming.pop(), now)
        ends_at = model.begin_step(now)
        assert ends_at is not None
        now = ends_at
        model.end_step()
    return [_measured(sequence, origin) for sequence in sequences]


def _measured(sequence: EngineSequence, origin: float) -> MeasuredRequest:
    assert sequence.scheduled_at is not None
    assert sequence.first_token_at is not None
    assert sequence.finished_at is not None
    return MeasuredRequest(
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=sequence.target_tokens,
        queued_at=origin + sequence.arrived_at,
        scheduled_at=origin + sequence.scheduled_at,
        first_token_at=origin + sequence.first_token_at,
        last_token_at=origin + sequence.finished_at,
    )


def as_row(request: MeasuredRequest) -> dict[str, object]:
    return {
        "request_id": "bench",
        "input_toks": request.prompt_tokens,
        "output_toks": request.output_tokens,
        "queued_ts": request.queued_at,
        "scheduled_ts": request.scheduled_at,
        "first_token_ts": request.first_token_at,
        "last_token_ts": request.last_token_at,
    }


def write_rows(path: Path, requests: list[MeasuredRequest], *more: str) -> Path:
    path.write_text("\n".join([*(json.dumps(as_row(request)) for request in requests), *more]) + "\n")
    return path


def as_record(request: MeasuredRequest, **changes: object) -> dict[str, object]:
    """What `bench --records` writes of the request, had it waited half a second in our queue."""
    return {
        "request_id": "bench-1",
        "arrived_at": request.queued_at - 0.5,
        "sent_at": request.queued_at - 0.5,
        "dispatched_at": request.queued_at,
        "first_token_at": request.first_token_at,
        "finished_at": request.last_token_at,
        "outcome": "completed",
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "replica": "s1",
        **changes,
    }
