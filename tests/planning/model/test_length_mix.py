import numpy as np
import pytest

from serve_app.planning.model.length_mix import LengthMix
from serve_app.workloads.trace import Trace, TraceRequest
from tests.planning.builders import mix


def test_a_trace_becomes_its_lengths() -> None:
    requests = tuple(
        TraceRequest(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
        for prompt, output in ((100, 20), (5_000, 0))
    )
    lengths = LengthMix.of(Trace(name="t", source="test", requests=requests))
    assert lengths.totals.tolist() == [120, 5_001]


def test_a_border_splits_by_the_whole_budget() -> None:
    lengths = mix((100, 28), (100, 29), (10, 500))
    short, long = lengths.split(128)
    assert (len(short), len(long)) == (1, 2)
    assert len(lengths.split(1_000)[1]) == 0


def test_every_prompt_needs_its_output() -> None:
    with pytest.raises(ValueError, match="3 and 2 lengths"):
        LengthMix(np.array([1, 2, 3]), np.array([1, 2]))


def test_without_max_tokens_a_high_quantile_of_answers_counts_as_the_answer() -> None:
    requests = tuple(
        TraceRequest(arrival_s=0.0, prompt_tokens=100, output_tokens=output) for output in range(1, 101)
    )
    trace = Trace(name="t", source="test", requests=requests)
    told, untold = (LengthMix.of(trace, output_known=known) for known in (True, False))
    assert len(told.split(150)[0]) == 50
    assert untold.allowed_outputs == 100
    assert len(untold.split(199)[0]) == 0
    short, long = untold.split(200)
    assert (len(short), len(long)) == (100, 0)
    assert short.allowed_outputs == 100
