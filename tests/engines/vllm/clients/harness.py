"""A gateway in front of a real engine, with its clients and their requests."""

import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema  # type: ignore[import-untyped]
import openai

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from tests.serving.gateway.builders import FakeDispatcher, rejection, serving

MODEL = "m"
KEY = "sk-of-the-tests"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
LONG: Any = [{"role": "user", "content": "word " * 900}]
# Any model ends such an answer, even one with random weights: nothing in it is unbounded.
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
# Enough for the longest answer that the schema allows, and for a tool call after its thoughts.
SCHEMA_TOKENS = 80


@dataclass
class ClientHarness:
    """Clients of a gateway, and a direct client of the engine.

    Attributes:
        dispatcher: the scheduler client, which records the gateway's calls.
        url: of the gateway, for clients created elsewhere.
    """

    dispatcher: FakeDispatcher
    url: str
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    direct: httpx.AsyncClient
    gateway: httpx.AsyncClient

    @property
    def counted(self) -> Usage:
        """Return the token counts that the gateway read from the last answer."""
        kind, outcome, usage = self.dispatcher.events[-1]
        assert (kind, outcome) == ("finished", Outcome.COMPLETED)
        found: Usage = usage
        return found

    def reject_next_as_too_long(self) -> None:
        """Reject the next request for good once the engine has found it too long."""
        self.dispatcher.script.extend([self.dispatcher.ports[0], rejection(Outcome.REJECTED_TOO_LONG)])

    def first_tokens(self) -> int:
        return self.dispatcher.names().count("first_token")

    async def direct_answer(self, path: str, **body: Any) -> Any:
        """Return the engine's own answer to a request that bypasses the gateway."""
        answer = await self.direct.post(path, json={"model": MODEL, "messages": QUESTION, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()


Check = Callable[[ClientHarness], Awaitable[None]]
Checks = dict[tuple[str, str], Check]


@asynccontextmanager
async def client_harness(engine_url: str) -> AsyncIterator[ClientHarness]:
    port = httpx.URL(engine_url).port
    assert port is not None
    dispatcher = FakeDispatcher([port])
    models = (ServedModel(name=MODEL, max_model_len=512),)
    settings = GatewaySettings(models=models, keys=(ApiKey(tenant="t", key=KEY),))
    app = Gateway(settings, {MODEL: dispatcher}, "gw")
    with tempfile.TemporaryDirectory() as folder:
        async with serving(app) as port_of_gateway:
            app.start_batches(Path(folder))
            url = f"http://127.0.0.1:{port_of_gateway}"
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as first,
                anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120) as second,
                httpx.AsyncClient(base_url=engine_url, timeout=120) as direct,
                httpx.AsyncClient(base_url=url, timeout=120, headers={"x-api-key": KEY}) as own,
            ):
                yield ClientHarness(dispatcher, url, first, second, direct, own)
        await app.drain(1.0, 1.0)
    app.close()


def check_schema(schema: Any, value: Any) -> None:
    """Raise unless the value matches the schema; text is parsed as JSON."""
    jsonschema.validate(json.loads(value) if isinstance(value, str) else value, schema)
