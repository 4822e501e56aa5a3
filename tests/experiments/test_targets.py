"""The baseline and the figures of the experiment on latency targets."""

from experiments.common.load_test.open_loop import BodySettings
from experiments.targets.figures import Judgement, figures_of
from experiments.targets.live import _RETRY, _Bodies, _Retrying
from experiments.targets.run import SCORED, WITHOUT, Case, _Run
from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome
from serve_app.lab.workloads import Trace, TraceRequest
from tests.experiments.scripted import raw, scripted, stream_of, streaming


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
        "met": Judgement(1.0, chance=0.1),
        "missed": Judgement(1.0, chance=0.4),
        "refused": Judgement(1.0, chance=0.9, refused=True),
        "shadow": Judgement(1.0, chance=0.9, refused=True, is_shadow=True),
        "refused+": Judgement(1.0, chance=0.2, retry_of="refused"),
    }
    records = [
        record("met", 0.5),
        record("missed", 2.0),
        record("refused", None, Outcome.REJECTED_DEADLINE_UNMEETABLE),
        record("shadow", 0.5),
        record("refused+", 0.5),
        record("other", 3.0),
    ]
    figures = figures_of(records, judged)
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


async def test_a_live_client_retries_a_refused_request_once_after_its_retry_after() -> None:
    refusal = raw(b"HTTP/1.1 429 X\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}")
    requests = tuple(TraceRequest(arrival_s=at, prompt_tokens=20, output_tokens=3) for at in (0.0, 0.2))
    async with scripted(refusal, streaming(stream_of()), refusal) as server:
        client = _Retrying(server.url, _Bodies(BodySettings(model="m"), (1.5, None)))
        records = await client.run(Trace(name="t", source="made for a test", requests=requests))
    heads = [head.lower() for head in server.heads]
    assert [b"x-slo-ttft-ms: 1500.000\r\nx-slo: refuse" in head for head in heads] == [True, False, True]
    # Only an equal request claims the place that is reserved for a retry.
    assert server.bodies[0] == server.bodies[2] != server.bodies[1]
    assert client.refused == {0: 1.0, _RETRY: 1.0}
    refused, other, retry = sorted(records, key=lambda one: one.arrived_at)
    assert (other.completed, retry.request_id) == (True, f"bench-{_RETRY}")
    assert retry.arrived_at >= refused.finished_at + 1.0
