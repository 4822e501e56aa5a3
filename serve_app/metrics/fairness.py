"""Jain's fairness index over tenants: what each was served, relative to its max-min fair share.

Served tokens alone say nothing, since a tenant that asks for little gets little. So each tenant's service is
divided by its max-min fair share of all that was served. A tenant that asked for less than its part has that
as its share, and the others divide the rest by weight. The index is 1 when each got exactly its share, and
1/n when one of n got everything. Only the span in which requests still arrive is counted. After it the
backlog is drained in any order, and every tenant would look equally served.

Sources: Jain, Chiu, Hawe, DEC-TR-301 (1984); max-min shares by water-filling: Bertsekas and Gallager, Data
Networks, 6.5.2.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from serve_app.metrics.record import RequestRecord


def jain_index(values: Iterable[float]) -> float | None:
    """`(sum x)^2 / (n * sum x^2)`: 1 when all are equal, 1/n when one has all; None when all are zero."""
    sample = list(values)
    squares = sum(value * value for value in sample)
    return sum(sample) ** 2 / (len(sample) * squares) if squares else None


def jain_of_tenants(
    records: Sequence[RequestRecord], weights: Mapping[str, float] | None = None
) -> float | None:
    """Jain's index over tenants of tokens served, as a share of the max-min fair share; 1.0 for one tenant.

    Args:
        records: all requests of a run, whatever their outcome.
        weights: how much of contended capacity is due to a tenant; 1 for tenants not named.

    Returns:
        The index, or None when nothing was served while requests arrived.
    """
    if not records:
        return None
    until = max(record.arrived_at for record in records)
    asked: dict[str, float] = defaultdict(float)
    served: dict[str, float] = defaultdict(float)
    for record in records:
        asked[record.tenant] += record.prompt_tokens + record.output_tokens
        served[record.tenant] += tokens_served(record, until)
    shares = max_min_shares(asked, sum(served.values()), weights or {})
    return jain_index(served[tenant] / share for tenant, share in shares.items() if share > 0)


def tokens_served(record: RequestRecord, until: float) -> float:
    """Tokens that an engine had processed for a request by the time `until`.

    The prompt counts at the first token, the output evenly from there to the end. Without a first token all
    of it counts at the end. A request that no engine answered counts nothing.
    """
    if record.output_tokens == 0 and not record.completed:
        return 0.0
    if until >= record.finished_at:
        return record.prompt_tokens + record.output_tokens
    if record.first_token_at is None or until < record.first_token_at:
        return 0.0
    elapsed_ratio = (until - record.first_token_at) / (record.finished_at - record.first_token_at)
    return record.prompt_tokens + record.output_tokens * elapsed_ratio


def max_min_shares(
    asked: Mapping[str, float], capacity: float, weights: Mapping[str, float]
) -> dict[str, float]:
    """Divide `capacity` by weight; what a tenant does not ask for is left to the others."""
    shares: dict[str, float] = {}
    left, weight_left = capacity, sum(weights.get(tenant, 1.0) for tenant in asked)
    # In ascending order of demand per weight, each tenant takes the lesser of its demand and its part.
    for tenant in sorted(asked, key=lambda name: asked[name] / weights.get(name, 1.0)):
        weight = weights.get(tenant, 1.0)
        shares[tenant] = min(asked[tenant], left * weight / weight_left)
        left -= shares[tenant]
        weight_left -= weight
    return shares
