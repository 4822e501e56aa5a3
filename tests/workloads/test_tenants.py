from collections import Counter

import pytest

from serve_app.workloads.streams import plain_stream, stream
from serve_app.workloads.tenants import assign_priorities, assign_tenants, parse_shares, zipf_shares
from serve_app.workloads.trace import TraceError
from tests.workloads.builders import trace


def test_zipf_shares_add_up_and_fall_with_the_rank() -> None:
    shares = list(zipf_shares(10).values())
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.34, abs=0.01)
    assert zipf_shares(2, 0) == {"tenant-1": 0.5, "tenant-2": 0.5}


def test_shares_are_read_by_count_by_exponent_and_by_name() -> None:
    assert parse_shares("3") == zipf_shares(3)
    assert parse_shares("3:2") == zipf_shares(3, 2)
    assert parse_shares("search=3, chat=1") == {"search": 0.75, "chat": 0.25}


@pytest.mark.parametrize("text", ["", "many", "3:x", "a=", "a=-1", "=3", "a=nan", "0", "2:-1"])
def test_shares_that_cannot_be_read_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(TraceError, match=r"shares|tenants"):
        parse_shares(text)


def test_tenants_get_about_their_share_and_nothing_else_changes() -> None:
    plain = trace(*[float(at) for at in range(4000)])
    tenanted = assign_tenants(plain, parse_shares("a=3,b=1"), stream(0, "tenants"))
    counts = Counter(request.tenant for request in tenanted.requests)
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert [one.arrival_s for one in tenanted.requests] == [one.arrival_s for one in plain.requests]


def test_priorities_are_drawn_by_share_and_unknown_classes_refused() -> None:
    drawn = assign_priorities(trace(*[0.0] * 50), {"batch": 1.0}, stream(0, "priorities"))
    assert {request.priority for request in drawn.requests} == {"batch"}
    with pytest.raises(TraceError, match="no priority class urgent: use interactive, default, batch"):
        assign_priorities(drawn, {"urgent": 1.0}, stream(0, "priorities"))


def test_streams_are_reproducible_and_refuse_a_negative_seed() -> None:
    assert plain_stream(3, "x").random() == plain_stream(3, "x").random()
    assert plain_stream(3, "x").random() != plain_stream(3, "y").random()
    with pytest.raises(ValueError, match="got -1"):
        stream(-1, "x")
