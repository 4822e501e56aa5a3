"""vLLM engine up to the point at which it needs vLLM."""

import pytest

from serve_app.engines.vllm import library
from serve_app.engines.vllm.engine import VllmEngine, VllmEngineSettings
from serve_app.errors import EngineError


def test_arguments_that_the_replica_sets_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"args\.port cannot be set here: the replica serves the engine"):
        VllmEngineSettings(model="m", args={"port": 8000})


def test_a_model_must_be_named() -> None:
    with pytest.raises(ValueError, match="model must not be empty: set it to the folder"):
        VllmEngineSettings(model="")


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    library.version.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)


@pytest.mark.usefixtures("no_vllm")
def test_arguments_are_not_checked_where_vllm_is_missing_which_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        VllmEngineSettings(model="m", args={"no_such_thing": 1}).check()
    assert "vLLM is not installed here: the arguments of m are validated when" in caplog.text


@pytest.mark.usefixtures("no_vllm")
async def test_an_engine_without_vllm_raises_with_the_remedy() -> None:
    engine = VllmEngine(VllmEngineSettings(model="m"))
    with pytest.raises(EngineError, match="run `scripts/setup vllm`"):
        await engine.start()


async def test_an_engine_that_was_not_started_rejects_every_call() -> None:
    engine = VllmEngine(VllmEngineSettings(model="m"))
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        _ = engine.app
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        await engine.check_health()
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        await engine.load()
    await engine.stop()
    await engine.stop()
