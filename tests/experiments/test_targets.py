"""The baseline and the figures of the experiment on latency targets."""

from experiments.targets.run import SCORED, WITHOUT, Case, _figures, _Judgement, _Run
from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome


def record(name: str, ttft_s: float | None, outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    return RequestRecord(
        request_id=name,
        arrived_at=1.0,
        finished_at=9.0,
        outcome=outcome,
        prompt_tokens=10,
        output_tokens=5,
        first_token_at=None if ttft_s is None else 1.0 + ttft_s,
    )


def test_refused_requests_count_as_missed_and_shadows_show_which_refusals_were_wrong() -> None:
    judged = {
        "met": _Judgement(1.0, chance=0.1),
        "missed": _Judgement(1.0, chance=0.4),
        "refused": _Judgement(1.0, chance=0.9, refused=True),
        "shadow": _Judgement(1.0, chance=0.9, refused=True, is_shadow=True),
        "refused+": _Judgement(1.0, chance=0.2, retry_of="refused"),
    }
    records = [
        record("met", 0.5),
        record("missed", 2.0),
        record("refused", None, Outcome.REJECTED_DEADLINE_UNMEETABLE),
        record("shadow", 0.5),
        record("refused+", 0.5),
        record("other", 3.0),
    ]
    figures = _figures(records, judged)
    assert figures["admitted_met"] == 2 / 3
    assert figures["goodput"] == 1 / 3
    assert figures["refused"] == 2 / 4
    assert figures["false_refusals"] == 1.0 * 2 / 4
    assert figures["retries_admitted"] == 1.0
    assert figures["others_mean_s"] == 3.0
    assert figures["bin_counts"] == [0, 1, 1, 0, 1, 0, 0, 0, 0, 1]
    assert figures["bin_misses"] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]


def test_all_variants_of_a_seed_serve_the_same_requests() -> None:
    case = Case(workload="mixed", rates_per_s=(10.0,))
    runs = [_Run(case, 60, 5, 10.0, variant, 0.0) for variant in (SCORED, WITHOUT)]
    drawn = [
        [(each.request.arrived_at, each.prompt_tokens, each.output_tokens) for each in run._drawn()[1]]
        for run in runs
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 60
    scored, without = (run.play() for run in runs)
    assert scored["refused"] == without["refused"] == 0.0
    assert scored["goodput"] == without["goodput"] == 1.0
