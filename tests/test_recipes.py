"""The additions of `CONTRIBUTING.md`: each works in a copy of the code in which exactly its files changed."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_ROW = re.compile(r"^\| (?P<name>an? [^|]+) \| (?P<files>[^|]*`serve_app/[^|]+) \|$", re.MULTILINE)

_POLICY = '''
from serve_app.core.policies.protocol import OrderingPolicy


class Lifo(OrderingPolicy):
    """Last come, first served."""

    def key(self, scheduled):
        return -scheduled.request.arrived_at

    def score(self, head, now):
        return head.request.arrived_at
'''

_ENGINE = '''
import json
from typing import ClassVar

from serve_app.core.settings_base import settings
from serve_app.engines.engine import EngineLimits, EngineLoad, read_body, send_response


class Echo:
    """Engine that answers with the last message."""

    async def start(self):
        return EngineLimits(max_model_len=4096, kv_tokens=65_536, max_num_seqs=8)

    async def app(self, scope, receive, send):
        said = json.loads(await read_body(receive))["messages"][-1]["content"]
        message = {"role": "assistant", "content": said}
        answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}
        await send_response(send, 200, json.dumps(answer).encode())

    async def load(self):
        return EngineLoad(waiting=0, running=0, kv_usage_ratio=0.0)

    async def check_health(self):
        pass

    async def stop(self):
        pass


@settings
class EchoSettings:
    """Settings of the echo."""

    PRIORITY_SETTING: ClassVar[str] = ""
    context_limit: ClassVar[int] = 4096
    schedules_by_priority: ClassVar[bool] = False
    simulated_profile: ClassVar[str | None] = None
    served_model_names: tuple[str, ...] | None = None

    def batch_limits(self):
        return {}

    def check(self):
        pass

    def make(self):
        return Echo()
'''

_CONFIGURATION = """
proxy_location: Disabled
http_options: {host: 127.0.0.1}
applications:
  - import_path: serve_app.app:build_app
    args:
      models:
        - name: demo
          pools: [{name: all, engine: {emulated: {}}}]
          scheduler: {advanced: {delay_bound: {most_s: 9.0}}}
"""

_SERVED = """
import asyncio
from serve_app.settings.application import EngineSettings
from tests.serving.gateway.builders import Engine, chat
from tests.serving.gateway.fleet import fleet_of

async def main():
    async with fleet_of([%s]) as fleet:
        answer = await fleet.http.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 200, answer.text
        print(dict(answer.headers), answer.text, (await fleet.http.get("/metrics")).text)

asyncio.run(main())
"""
_ECHO = 'EngineSettings(echo=EngineSettings.__annotations__["echo"].__args__[0]()).hosted.make().app'


@dataclass(frozen=True)
class Recipe:
    """An addition.

    Attributes:
        edits: by file, a new file, or texts and what replaces them.
        proof: arguments of Python.
        shows: what is in its output once the addition was made.
    """

    edits: Mapping[str, str | Mapping[str, str]]
    proof: tuple[str, ...]
    shows: str


RECIPES = {
    "a policy": Recipe(
        {
            "serve_app/core/policies/lifo.py": _POLICY,
            "serve_app/core/policies/__init__.py": {
                "import Ewsjf\n": "import Ewsjf\nfrom serve_app.core.policies.lifo import Lifo\n",
                '    "fcfs": lambda': '    "lifo": lambda _: Lifo(),\n    "fcfs": lambda',
            },
        },
        ("-m", "serve_app", "simulate", "--trace=paper-mix", "--requests=50", "--load=0.5", "--policy=lifo"),
        "| lifo   |     1 |",
    ),
    "an engine": Recipe(
        {
            "serve_app/engines/echo.py": _ENGINE,
            "serve_app/settings/application.py": {
                "from serve_app.engines.emulated.engine": "from serve_app.engines.echo import EchoSettings\n"
                "from serve_app.engines.emulated.engine",
                "    vllm: VllmEngineSettings | None": "    echo: EchoSettings | None = None\n"
                "    vllm: VllmEngineSettings | None",
            },
        },
        ("-c", _SERVED % _ECHO),
        '"content": "hello"',
    ),
    "a header of answers": Recipe(
        {
            "serve_app/serving/gateway/request/fields.py": {
                'b"x-queue-wait-ms: %.1f': 'b"x-scheduled-by: ewsjf\\r\\nx-queue-wait-ms: %.1f'
            }
        },
        ("-c", _SERVED % "Engine()"),
        "'x-scheduled-by': 'ewsjf'",
    ),
    "a metric of a gateway": Recipe(
        {
            "serve_app/serving/gateway/telemetry.py": {
                '            ("connects", ': '            ("models", "Models.", len(self.in_flight)),\n'
                '            ("connects", '
            }
        },
        ("-c", _SERVED % "Engine()"),
        "ewsjf_gateway_upstream_models_total{",
    ),
    "a setting": Recipe(
        {
            "serve_app/core/queueing/delay_bound.py": {
                "    wait_ratio: Annotated": "    most_s: float = 60.0\n    wait_ratio: Annotated"
            }
        },
        ("-m", "serve_app", "check", "--skip-machine-checks", "app.yaml"),
        "app.yaml is valid",
    ),
}


def rows() -> dict[str, list[str]]:
    """Return the files that the table of the recipes names, by addition."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return {row["name"]: re.findall(r"`([^`]+)`", row["files"]) for row in _ROW.finditer(text)}


def test_the_table_has_these_additions() -> None:
    assert rows().keys() == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_an_addition_needs_only_the_files_that_the_table_names(name: str, tmp_path: Path) -> None:
    recipe, named = RECIPES[name], rows()[name]
    for path, each in zip(recipe.edits, named, strict=True):
        assert path == each or path.startswith(f"{each}/")
    shutil.copytree(ROOT / "serve_app", tmp_path / "serve_app", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "app.yaml").write_text(_CONFIGURATION)
    for path, edit in recipe.edits.items():
        text = edit if isinstance(edit, str) else (tmp_path / path).read_text()
        for before, after in () if isinstance(edit, str) else edit.items():
            assert text.count(before) == 1
            text = text.replace(before, after)
        (tmp_path / path).write_text(text)
    assert recipe.shows in output_of(recipe, tmp_path)


def output_of(recipe: Recipe, folder: Path) -> str:
    """Run the proof with the code in a folder, and the tests' builders; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, *recipe.proof]
    output = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=output, stderr=output, text=True
    ) as ran:
        return "".join(ran.communicate(timeout=120))
