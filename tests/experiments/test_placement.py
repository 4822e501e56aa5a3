"""The experiment `placement`: conversations, sessions that share instructions, and unlike replicas."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.experiment import Context
from experiments.placement.affinity import (
    EXPERIMENT,
    AffinitySettings,
    ReplicaChoice,
    SessionSettings,
    play_sessions,
)
from experiments.placement.run import EXPERIMENT as PLACEMENT
from experiments.placement.sessions import SESSIONS, ConversationSettings, conversations
from experiments.placement.speeds import ALIKE, KNOWN, LEARNED, SpeedsSettings, Workload, play_run
from serve_app.errors import SettingsError
from serve_app.lab.workloads import PREFIX_BLOCK_TOKENS, Trace

SETTINGS = ConversationSettings()
WORKLOADS: dict[str, Callable[[int, float, int], Trace]] = {
    "conversations": partial(conversations, settings=SETTINGS),
    **{name: SESSIONS[name].trace for name in SESSIONS},
}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_has_its_rate_and_the_same_requests_for_the_same_seed(workload: str) -> None:
    one, again, other = (WORKLOADS[workload](3_000, 5.0, seed).requests for seed in (1, 1, 2))
    assert one == again
    assert one != other
    arrivals = [request.arrival_s for request in one]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == 3_000
    # Later turns of the first sessions are still to come at the start.
    assert 2_000 / (arrivals[-1] - arrivals[999]) == pytest.approx(5.0, rel=0.15)


def test_prompts_have_an_id_for_each_whole_block() -> None:
    for request in conversations(500, 5.0, 0, SETTINGS).requests:
        assert len(request.prefix) == request.prompt_tokens // PREFIX_BLOCK_TOKENS
        assert request.prompt_tokens + request.output_tokens <= SETTINGS.max_context_tokens


def test_most_of_a_prompt_has_been_sent_before() -> None:
    seen: set[int] = set()
    known = total = 0
    for request in conversations(3_000, 5.0, 0, SETTINGS).requests:
        known += PREFIX_BLOCK_TOKENS * sum(block in seen for block in request.prefix)
        total += request.prompt_tokens
        seen.update(request.prefix)
    assert 0.7 < known / total < 0.9


def test_one_application_gives_all_sessions_the_same_beginning() -> None:
    alike = ConversationSettings(applications=1, instruction_tokens=(1_024, 1_024), mean_turns=1.0)
    requests = conversations(50, 5.0, 0, alike).requests
    assert len({request.prefix[:2] for request in requests}) == 1
    assert len({request.prefix for request in requests if len(request.prefix) > 2}) > 1


# -- sessions whose turns share instructions, under rules for the choice of a replica ---------------------

CHOICES = {
    "affinity": ReplicaChoice(policy="fcfs", affinity=True),
    "lmetric": ReplicaChoice(balance="lmetric"),
}
SESSION_SETTINGS = SessionSettings(
    profile="llama31-8b-h100-tp1", rates_per_s={}, choices=CHOICES, requests=1_500, seeds=(30,)
)


@pytest.mark.application
@pytest.mark.parametrize(("workload", "rate_per_s"), [("code generation", 9.5), ("b2b-saas", 4.5)])
def test_affinity_finds_as_much_in_the_caches_as_a_rule_that_knows_them_exactly(
    workload: str, rate_per_s: float
) -> None:
    ours, best = (
        play_sessions(workload, SESSION_SETTINGS, CHOICES[name], 4, rate_per_s, 30) for name in CHOICES
    )
    assert ours["hit_ratio"] > best["hit_ratio"] - 0.03
    assert ours["ttft_mean_s"] < 1.25 * best["ttft_mean_s"]
    assert ours["tpot_mean_s"] < 1.1 * best["tpot_mean_s"]


def test_the_questions_of_a_customer_share_its_instructions_and_nothing_else() -> None:
    by_customer = defaultdict(list)
    for request in SESSIONS["b2b-saas"].trace(1_000, 5.0, 0).requests:
        assert (request.prompt_tokens, request.output_tokens) == (7_200, 1_000)
        by_customer[request.prefix[0]].append(request.prefix)
    assert 100 < len(by_customer) <= 150
    for prefixes in by_customer.values():
        assert len({prefix[:11] for prefix in prefixes}) == 1
        assert len({prefix[11] for prefix in prefixes}) == len(prefixes)


def test_reasoning_has_short_prompts_of_their_own_and_long_answers() -> None:
    requests = SESSIONS["reasoning"].trace(3_000, 5.0, 0).requests
    assert statistics.fmean(one.prompt_tokens for one in requests) == pytest.approx(1_250, rel=0.05)
    assert statistics.fmean(one.output_tokens for one in requests) == pytest.approx(7_900, rel=0.05)
    assert min(one.output_tokens for one in requests) >= 500
    assert max(one.output_tokens for one in requests) <= 32_000
    blocks = [block for one in requests for block in one.prefix]
    assert len(blocks) == len(set(blocks))


def test_an_unknown_workload_is_named_with_those_that_there_are() -> None:
    settings = AffinitySettings(
        profile="llama31-8b-rtx4090-tp1",
        replicas=1,
        loads=(),
        choices={},
        requests=1,
        seeds=0,
        sessions={"chess": SESSION_SETTINGS},
    )
    with pytest.raises(
        SettingsError, match=r"no workload chess: there are code generation, reasoning, b2b-saas"
    ):
        list(EXPERIMENT.play(settings, Context(jobs=1)))


# -- replicas of unlike speed -----------------------------------------------------------------------------


@pytest.mark.application
@pytest.mark.parametrize("metrics", [True, False])
def test_learned_speeds_serve_sessions_about_as_well_as_known_ones(metrics: bool) -> None:
    code = "code generation"
    read: SpeedsSettings = read_settings(Catalogue().config("placement"), PLACEMENT.settings).speeds
    settings = replace(read, workloads={code: Workload(saturated_per_s=8.2, requests=1_500)})
    learned, known, alike = (
        play_run(settings, code, 0.9, metrics, variant, seed=7) for variant in (LEARNED, KNOWN, ALIKE)
    )
    assert learned["e2e_mean_s"] < 1.05 * known["e2e_mean_s"]
    assert learned["e2e_mean_s"] < 1.02 * alike["e2e_mean_s"]
    assert learned["ttft_mean_s"] < 1.1 * min(known["ttft_mean_s"], alike["ttft_mean_s"])
