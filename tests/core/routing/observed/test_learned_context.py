"""Context limit learned from rejections and answers."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.observed import LearnedContext


def test_without_a_number_the_limit_is_below_the_shortest_rejected_and_not_below_the_longest_served() -> None:
    context = LearnedContext()
    context.on_served(900)
    context.on_rejection(3_000, None)
    assert context.limit_tokens == 2_999
    context.on_rejection(2_000, None)
    context.on_rejection(2_500, None)
    assert context.limit_tokens == 1_999
    # An estimate below a served length is wrong.
    context.on_rejection(800, None)
    assert context.limit_tokens == 1_999


def test_a_count_of_another_engine_replaces_estimates() -> None:
    context = LearnedContext()
    context.on_rejection(1_200, None)
    context.on_counted(2_100)
    assert context.limit_tokens == 2_099
    context.on_rejection(1_500, None)
    assert context.limit_tokens == 1_499
    context.on_counted(1_900)
    assert context.limit_tokens == 1_899


def test_a_limit_contradicted_by_a_longer_answer_is_discarded() -> None:
    context = LearnedContext()
    context.on_rejection(1_200, None)
    context.on_served(1_500)
    assert context.limit_tokens is None
    context.on_rejection(1_600, 1_024)
    assert context.limit_tokens == 1_024
    context.on_served(1_025)
    assert context.limit_tokens is None


events = st.lists(
    st.tuples(st.integers(1, 4_000), st.floats(1.0, 1.5), st.booleans(), st.booleans()),
    max_size=40,
)


@given(limit=st.integers(100, 3_000), history=events)
def test_with_true_upper_estimates_the_limit_is_between_served_and_rejected_lengths(
    limit: int, history: list[tuple[int, float, bool, bool]]
) -> None:
    context, served, rejected = LearnedContext(), 0, [10**6]
    for tokens, overestimate, states, served_elsewhere in history:
        if tokens <= limit:
            context.on_served(tokens)
            served = max(served, tokens)
            continue
        estimated = int(tokens * overestimate)
        context.on_rejection(estimated, limit if states else None)
        rejected.append(tokens if served_elsewhere else estimated)
        if served_elsewhere:
            context.on_counted(tokens)
    found = context.limit_tokens
    # The learned limit never excludes a length that is served, and stays below the longest rejected one.
    assert found is None or found >= min(limit, served)
    if found is not None:
        assert found >= limit
        assert found < max(rejected)
    if any(tokens > limit for tokens, *_ in history):
        assert found is not None
