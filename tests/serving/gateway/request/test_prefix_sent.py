"""Prefix hashes that a gateway sends to the scheduler, and the cache salt that engines receive."""

import json

from serve_app.serving.gateway.request.prefix import PrefixSettings, engine_salt
from tests.serving.gateway.builders import chat
from tests.serving.gateway.conftest import Stage, staged

CHAT = "/v1/chat/completions"
LONG = [{"role": "user", "content": "x" * 600}]


async def test_the_scheduler_gets_the_prefix_of_a_prompt(stage: Stage) -> None:
    await stage.http.post(CHAT, json=chat(messages=LONG))
    assert len(stage.dispatcher.submissions[0].prefix) == 1
    assert "cache_salt" not in json.loads(stage.engine.bodies[0])


async def test_with_prefixes_switched_off_the_scheduler_gets_none() -> None:
    async with staged(prefix=PrefixSettings(enabled=False)) as stage:
        await stage.http.post(CHAT, json=chat(messages=LONG))
        assert stage.dispatcher.submissions[0].prefix == ()


async def test_isolated_tenants_share_neither_hashes_nor_blocks_of_an_engine() -> None:
    async with staged(prefix=PrefixSettings(per_tenant=True)) as stage:
        for tenant in ("a", "b", "a"):
            body = chat(messages=LONG, cache_salt="of the client")
            await stage.http.post(CHAT, json=body, headers={"x-tenant": tenant})
        first, other, again = (submission.prefix for submission in stage.dispatcher.submissions)
        assert first == again != other
        salts = [json.loads(sent)["cache_salt"] for sent in stage.engine.bodies]
        assert salts == [engine_salt(tenant, "of the client") for tenant in ("a", "b", "a")]
