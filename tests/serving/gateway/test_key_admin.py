"""The admin API of keys: creation, limits, revocation, and the audit log."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.serving.api_keys import changed_keys, read_keys
from serve_app.serving.gateway import ServedModel

from .builders import Answers, admin_client

COUNTS = [2, 1_000_000, 0, 500_000]


@asynccontextmanager
async def client(path: Path | None) -> AsyncIterator[httpx.AsyncClient]:
    async def spent(keys: list[str]) -> dict[str, Any]:
        return {key: {"day": {"a": COUNTS}, "month": {"a": COUNTS}} for key in keys}

    async def usage() -> dict[str, Any]:
        names = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
        row = {"day": "2026-11-27", "key": "=k", **dict(zip(names, COUNTS, strict=True))}
        return {"model": "a", "rows": [{**row, "model": "a"}, {**row, "model": "free"}]}

    if path is not None:
        changed_keys(path, lambda keys: keys)
    models = (ServedModel(name="a", price=TokenPrices(prompt=1.0, generated=2.0)),)
    changes = {"models": models, "keys_file": None if path is None else str(path)}
    async with admin_client({"a": Answers(spent=spent, usage=usage)}, **changes) as http:
        yield http


async def test_a_key_is_created_changed_and_revoked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.json"
    caplog.set_level(logging.INFO, "ray.serve")
    async with client(path) as http:
        made = (await http.post("/admin/keys", json={"tenant": "app", "cost_per_day": 2.5})).json()
        assert made["secret"].startswith(f"ewsjf_{made['id']}_")
        assert "hash" not in made
        (kept,) = read_keys(path)
        assert (kept.id, kept.tenant, kept.cost_per_day) == (made["id"], "app", 2.5)

        (listed,) = (await http.get("/admin/keys")).json()["keys"]
        assert "secret" not in listed
        assert listed["status"] == "valid"
        assert listed["used"]["day"] == {"tokens": 1_500_000, "cost": 2.0}

        changes = {"tokens_per_day": 5, "cost_per_day": None, "models": ["a"], "highest_class": "batch"}
        changed = await http.post(f"/admin/keys/{made['id']}", json=changes)
        assert changed.status_code == 200
        (kept,) = read_keys(path)
        assert (kept.tokens_per_day, kept.cost_per_day, kept.models) == (5, None, ("a",))
        assert kept.hash
        assert "secret" not in changed.json()

        assert (await http.delete(f"/admin/keys/{made['id']}")).json()["status"] == "revoked"
        assert read_keys(path)[0].status() == "revoked"
    audits = [record.getMessage() for record in caplog.records if "event=audit" in record.getMessage()]
    assert [line.split()[1] for line in audits] == [
        "action=key_created",
        "action=key_changed",
        "action=key_revoked",
    ]
    assert all("by=config/ops client=127.0.0.1" in line and made["id"] in line for line in audits)
    assert made["secret"] not in caplog.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tenant": "app", "tokens_per_dya": 5}, "no permission 'tokens_per_dya'; permissions: admin,"),
        ({"tenant": "app", "id": "x"}, "no permission 'id'"),
        ({"tenant": "app", "hash": "x"}, "no permission 'hash'"),
        ({}, "belongs to a tenant"),
        ({"tenant": "two words"}, "short printable name"),
        ({"tenant": "app", "tokens_per_day": 0}, ">= 1"),
        ({"tenant": "app", "cost_per_day": 0}, "> 0"),
        ([], "the body must be like"),
    ],
)
async def test_impossible_keys_are_rejected(tmp_path: Path, body: Any, message: str) -> None:
    path = tmp_path / "keys.json"
    async with client(path) as http:
        answer = await http.post("/admin/keys", json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        assert read_keys(path) == ()


async def test_unknown_keys_and_a_missing_file_are_named(tmp_path: Path) -> None:
    async with client(tmp_path / "keys.json") as http:
        for answer in (await http.delete("/admin/keys/none"), await http.post("/admin/keys/none", json={})):
            assert answer.status_code == 404
            assert "has no key none" in answer.json()["error"]["message"]
        assert (await http.put("/admin/keys")).status_code == 405
    async with client(None) as http:
        answer = await http.get("/admin/keys")
        assert answer.status_code == 409
        assert "set gateway.keys_file" in answer.json()["error"]["message"]


async def test_only_admins_manage_keys(tmp_path: Path) -> None:
    async with client(tmp_path / "keys.json") as http:
        headers = {"authorization": "Bearer k2"}
        answers = [
            await http.get("/admin/keys", headers=headers),
            await http.post("/admin/keys", json={"tenant": "t", "admin": True}, headers=headers),
            await http.delete("/admin/keys/x", headers=headers),
        ]
        assert [answer.status_code for answer in answers] == [403] * 3
    assert read_keys(tmp_path / "keys.json") == ()


async def test_usage_has_a_cost_and_is_a_table(tmp_path: Path) -> None:
    async with client(tmp_path / "keys.json") as http:
        rows = (await http.get("/debug/usage")).json()["models"][0]["rows"]
        assert [row["cost"] for row in rows] == [2.0, None]
        table = (await http.get("/debug/usage.csv")).text.splitlines()
    assert table == [
        "day,key,model,requests,prompt_tokens,cached_tokens,generated_tokens,cost",
        "2026-11-27,'=k,a,2,1000000,0,500000,2.000000",
        "2026-11-27,'=k,free,2,1000000,0,500000,",
    ]
