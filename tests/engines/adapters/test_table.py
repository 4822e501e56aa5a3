"""The documentation's table of servers, cell by cell against the recorded pages."""

import asyncio
from dataclasses import replace
from pathlib import Path

from serve_app.engines.adapters import EngineReading, identify
from tests.engines.adapters.pages import page_of, server
from tests.engines.adapters.recorded_servers import SERVERS

DOCUMENT = Path(__file__).parents[3] / "docs" / "servers.md"
HEADER = "| server | queue | batch | KV use | time per token | context | KV size | batch limit | page |"


def documented() -> list[str]:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = lines.index(HEADER) + 2
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append(line)
    return rows


def found(name: str) -> str:
    """Return the table row of one server as its adapter reads it."""
    described = asyncio.run(identify(server(SERVERS[name])))
    path = described.metrics_path
    reading = described.read(page_of(SERVERS[name], path)) if path else EngineReading()
    limits = described.limits
    # A metrics page may also state a limit.
    limits = replace(limits, kv_tokens=limits.kv_tokens or reading.kv_tokens)
    cells = (
        *(reading.waiting, reading.running, reading.kv_usage_ratio, reading.token_gaps),
        *(limits.max_model_len, limits.kv_tokens, limits.max_num_seqs),
    )
    told = ["no" if cell is None else "yes" for cell in cells]
    return f"| {name} | {' | '.join(told)} | {f'`{path}`' if path else 'none'} |"


def test_the_table_says_what_the_adapters_find() -> None:
    assert documented() == [found(name) for name in SERVERS]


def test_what_is_lacking_is_what_the_table_has_no_for() -> None:
    for name in SERVERS:
        described = asyncio.run(identify(server(SERVERS[name])))
        assert len(described.lacks) == found(name).count("| no "), name
