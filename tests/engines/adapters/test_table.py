"""The documentation's tables of servers, cell by cell against the recorded pages."""

import asyncio
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from serve_app.engines.adapters import EngineReading, identify
from tests.engines.adapters.pages import page_of, server
from tests.engines.adapters.recorded_servers import SERVERS

DOCUMENT = Path(__file__).parents[3] / "docs" / "servers.md"
LOAD = "| server | queue | batch | KV use | time per token | page |"
LIMITS = "| server | context | KV size | batch limit |"


def documented(header: str) -> list[str]:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = lines[lines.index(header) + 2 :]
    return list(takewhile(lambda line: line.startswith("|"), rows))


def found(name: str) -> tuple[str, str]:
    """Return one server's rows of load and limits as its adapter reads them."""
    described = asyncio.run(identify(server(SERVERS[name])))
    path = described.metrics_path
    reading = described.read(page_of(SERVERS[name], path)) if path else EngineReading()
    limits = described.limits
    # A metrics page may also state a limit.
    limits = replace(limits, kv_tokens=limits.kv_tokens or reading.kv_tokens)
    load = _row(name, reading.waiting, reading.running, reading.kv_usage_ratio, reading.token_gaps)
    return (
        f"{load} {f'`{path}`' if path else 'none'} |",
        _row(name, limits.max_model_len, limits.kv_tokens, limits.max_num_seqs),
    )


def _row(name: str, *cells: object) -> str:
    return f"| {name} | {' | '.join('no' if cell is None else 'yes' for cell in cells)} |"


def test_the_tables_say_what_the_adapters_find() -> None:
    rows = [found(name) for name in SERVERS]
    assert documented(LOAD) == [load for load, _ in rows]
    assert documented(LIMITS) == [limits for _, limits in rows]


def test_missing_values_are_a_no_in_the_tables() -> None:
    for name in SERVERS:
        described = asyncio.run(identify(server(SERVERS[name])))
        assert len(described.limitations) == " ".join(found(name)).count("| no "), name
