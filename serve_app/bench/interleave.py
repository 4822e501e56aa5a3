"""The same requests against two endpoints in turns, so that a drift of the machine or the network hits both.

The trace is cut into slices of equal time. Each slice goes to one endpoint, and when its last answer has
ended, to the other: neither works while the other is measured. They take turns in being first, which cancels
a steady drift (the order A B, B A, A B ...). Prompts of one endpoint do not begin like those of the other,
unless the trace says that they share a prefix: where both have the same engines, the second finds nothing of
the first in a prefix cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.connection import ConnectionPool, Target
from serve_app.bench.load import ClientFigures, LoadSettings, OpenLoop
from serve_app.metrics.record import RequestRecord
from serve_app.workloads.trace import Trace


@dataclass(frozen=True, slots=True)
class ComparedEndpoint:
    """One of the two, and what requests to it say."""

    target: Target
    bodies: BodySettings


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """One request of the trace at both endpoints.

    Attributes:
        slice_number: the slice that it was in.
    """

    slice_number: int
    base: RequestRecord
    other: RequestRecord


@dataclass(frozen=True, slots=True)
class Interleaved:
    """The pairs of a run in the order of the trace, and the client's figures at both endpoints together."""

    pairs: list[AnswerPair]
    client: ClientFigures


def slices_of(trace: Trace, slice_s: float) -> Iterator[Trace]:
    """The trace in parts of equal time; a part without requests is left out."""
    members: dict[int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        members.setdefault(int(request.arrival_s // slice_s), []).append(number)
    for numbers in members.values():
        yield replace(trace, requests=tuple(trace.requests[number] for number in numbers))


async def interleave(
    trace: Trace,
    endpoints: tuple[ComparedEndpoint, ComparedEndpoint],
    settings: LoadSettings,
    slice_s: float,
    on_record: Callable[[RequestRecord], object] = lambda _: None,
) -> Interleaved:
    """Send every request of the trace to both endpoints, slice by slice.

    When it is cancelled, the pairs of the slices that both have completed are returned.

    Args:
        on_record: called with each record, for a progress bar.
    """
    pools = [ConnectionPool(endpoint.target) for endpoint in endpoints]
    factories = [
        BodyFactory(endpoint.bodies, endpoint.target.authority, endpoint.target.path_prefix)
        for endpoint in endpoints
    ]
    pairs: list[AnswerPair] = []
    client = ClientFigures()
    sent = 0
    try:
        for number, part in enumerate(slices_of(trace, slice_s)):
            records: dict[int, dict[str, RequestRecord]] = {}
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                # Numbers make the prompts: even ones for one endpoint, odd ones for the other.
                loop = OpenLoop(pools[side], factories[side], settings, on_record, 2 * sent + side, 2)
                played = await loop.run(part)
                _add(client, played.client)
                client.connections = sum(pool.opened for pool in pools)
                records[side] = {record.request_id: record for record in played.records}
                if client.interrupted:
                    return Interleaved(pairs, client)
            pairs += _paired(number, sent, len(part.requests), records)
            sent += len(part.requests)
    finally:
        for pool in pools:
            pool.close()
    return Interleaved(pairs, client)


def _paired(
    slice_number: int, first: int, count: int, records: dict[int, dict[str, RequestRecord]]
) -> Iterator[AnswerPair]:
    for number in range(first, first + count):
        base, other = (records[side][f"bench-{2 * number + side}"] for side in (0, 1))
        yield AnswerPair(slice_number, base, other)


def _add(client: ClientFigures, of_slice: ClientFigures) -> None:
    """Count what happened in one slice as well."""
    client.late += of_slice.late
    client.held_back += of_slice.held_back
    client.peak_in_flight = max(client.peak_in_flight, of_slice.peak_in_flight)
    client.wrong_length += of_slice.wrong_length
    client.without_usage += of_slice.without_usage
    client.interrupted |= of_slice.interrupted
