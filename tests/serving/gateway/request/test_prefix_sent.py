"""Prefix hashes that a gateway sends to the scheduler, and the cache salt that engines receive."""

import json

import pytest

from serve_app.serving.gateway.request.measure import PrefixSettings, engine_salt
from tests.serving.gateway.builders import MODEL, chat
from tests.serving.gateway.conftest import GatewayHarness, running_gateway

CHAT = "/v1/chat/completions"
LONG = [{"role": "user", "content": "x" * 600}]


async def test_the_scheduler_gets_the_prefix_of_a_prompt(harness: GatewayHarness) -> None:
    await harness.http.post(CHAT, json=chat(messages=LONG))
    assert len(harness.dispatcher.submissions[0].prefix) == 1
    assert "cache_salt" not in json.loads(harness.engine.bodies[0])


async def test_with_prefixes_switched_off_the_scheduler_gets_none() -> None:
    async with running_gateway(prefix=PrefixSettings(enabled=False)) as harness:
        await harness.http.post(CHAT, json=chat(messages=LONG))
        assert harness.dispatcher.submissions[0].prefix == ()


async def test_isolated_tenants_share_neither_hashes_nor_blocks_of_an_engine() -> None:
    async with running_gateway(prefix=PrefixSettings(per_tenant=True)) as harness:
        for tenant in ("a", "b", "a"):
            body = chat(messages=LONG, cache_salt="of the client")
            await harness.http.post(CHAT, json=body, headers={"x-tenant": tenant})
        first, other, again = (submission.prefix for submission in harness.dispatcher.submissions)
        assert first == again != other
        salts = [json.loads(sent)["cache_salt"] for sent in harness.engine.bodies]
        assert salts == [engine_salt(tenant, "of the client") for tenant in ("a", "b", "a")]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v2/rerank", "/pooling", "/classify"])
async def test_isolated_tenants_share_no_blocks_of_embeddings_scores_and_ranks(path: str) -> None:
    async with running_gateway(prefix=PrefixSettings(per_tenant=True)) as harness:
        for tenant in ("a", "b"):
            body = {"model": MODEL, "input": "x" * 600, "cache_salt": "of the client"}
            await harness.http.post(path, json=body, headers={"x-tenant": tenant})
        salts = [json.loads(sent)["cache_salt"] for sent in harness.engine.bodies]
        assert salts == [engine_salt(tenant, "of the client") for tenant in ("a", "b")]
