import numpy as np
import pytest

from experiments.prefix.run import ConversationSettings, conversations
from serve_app.lab.workloads import PREFIX_BLOCK_TOKENS

SETTINGS = ConversationSettings()


def test_the_same_seed_draws_the_same_conversations_in_order_of_arrival() -> None:
    one, other = (conversations(500, 5.0, 3, SETTINGS) for _ in range(2))
    assert one == other
    assert one != conversations(500, 5.0, 4, SETTINGS)
    arrivals = [request.arrival_s for request in one.requests]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == 500


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


def test_the_rate_is_nearly_the_requested_one() -> None:
    arrivals = np.array([request.arrival_s for request in conversations(5_000, 5.0, 0, SETTINGS).requests])
    later = arrivals[1_000:]
    assert len(later) / (later[-1] - later[0]) == pytest.approx(5.0, rel=0.15)
