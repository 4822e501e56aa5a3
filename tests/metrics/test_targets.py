from serve_app.errors import Outcome
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.targets import ClassTarget, ClassTargets, Miss

TARGETS = ClassTargets(default=ClassTarget(ttft_s=1.0, long_ttft_s=10.0, tpot_s=0.1))


def record(**changes: object) -> RequestRecord:
    fields: dict[str, object] = {
        "request_id": "r1",
        "arrived_at": 0.0,
        "first_token_at": 0.5,
        "finished_at": 1.4,
        "outcome": Outcome.COMPLETED,
        "prompt_tokens": 10,
        "output_tokens": 10,
    }
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_request_may_miss_both_latencies() -> None:
    assert TARGETS.missed_by(record()) == ()
    assert TARGETS.missed_by(record(first_token_at=1.1, finished_at=1.5)) == (Miss.TTFT,)
    assert TARGETS.missed_by(record(finished_at=2.0)) == (Miss.TPOT,)
    assert TARGETS.missed_by(record(first_token_at=2.0, finished_at=9.0)) == (Miss.TTFT, Miss.TPOT)
    # A long prompt has more time, and an answer in one piece has neither latency.
    assert TARGETS.missed_by(record(first_token_at=2.0, finished_at=2.5, prompt_tokens=9_999)) == ()
    assert TARGETS.missed_by(record(first_token_at=None, finished_at=60.0)) == ()


def test_what_was_not_answered_misses_by_its_outcome() -> None:
    kinds = {
        Outcome.EXPIRED: Miss.EXPIRED,
        Outcome.FAILED: Miss.FAILED,
        Outcome.CANCELLED: Miss.ABANDONED,
        Outcome.REJECTED_QUEUE_FULL: Miss.REFUSED,
        Outcome.REJECTED_NO_REPLICA: Miss.REFUSED,
    }
    for outcome, kind in kinds.items():
        assert TARGETS.missed_by(record(outcome=outcome)) == (kind,)


def test_what_was_not_ours_to_keep_is_not_judged() -> None:
    assert not TARGETS.judges(record(outcome=Outcome.REJECTED_INVALID))
    assert not TARGETS.judges(record(outcome=Outcome.CANCELLED, first_token_at=None, finished_at=0.9))
    assert TARGETS.judges(record(outcome=Outcome.CANCELLED, first_token_at=None, finished_at=1.1))
    assert TARGETS.judges(record(outcome=Outcome.EXPIRED))
