"""vLLM engine up to the point at which it needs vLLM."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.engines.vllm import library
from serve_app.engines.vllm.engine import VllmEngine, VllmEngineSettings
from serve_app.errors import EngineError, SettingsError


def test_arguments_that_the_replica_sets_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"args\.port cannot be set here: the replica serves the engine"):
        VllmEngineSettings(model="m", args={"port": 8000})


def test_a_model_must_be_named() -> None:
    with pytest.raises(ValueError, match="model must not be empty: set it to the folder"):
        VllmEngineSettings(model="")


PROFILE = "llama31-8b-rtx4090-tp1"


def test_an_unknown_profile_is_rejected_with_the_nearest_ones() -> None:
    with pytest.raises(SettingsError, match=r"no engine profile 'llama31-8b-4090': did you mean llama31-8b-"):
        VllmEngineSettings(model="m", timed="llama31-8b-4090")


@pytest.mark.parametrize("name", ["distributed_executor_backend", "speculative_config"])
def test_a_timed_engine_rejects_what_it_cannot_do(name: str) -> None:
    with pytest.raises(ValueError, match=rf"args\.{name} cannot be set for a timed engine: "):
        VllmEngineSettings(model="m", timed=PROFILE, args={name: "x"})


def test_a_timed_engine_has_the_limits_of_its_profile_unless_they_are_given() -> None:
    engine = VllmEngineSettings(model="m", timed=PROFILE, args={"max_model_len": 4_096})
    assert engine.context_limit == 4_096
    assert engine.arguments()["max_num_batched_tokens"] == 2_048
    assert engine.simulated_profile == PROFILE


def test_a_timed_engine_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        SettingsError, match="has no tokenizer, which a timed engine needs: add the tokenizer"
    ):
        VllmEngineSettings(model=str(tmp_path), timed=PROFILE).check()


@pytest.mark.parametrize("has_changed", ["imports", "methods"])
def test_a_vllm_with_other_executors_is_reported_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, has_changed: str
) -> None:
    def imported(name: str) -> SimpleNamespace:
        if name == "vllm.version":
            return SimpleNamespace(__version__="0.33.9", __version_tuple__=(0, 33, 9))
        if has_changed == "imports":
            raise ImportError("cannot import name 'LogprobsLists'")
        return SimpleNamespace(TimedExecutor=SimpleNamespace(__abstractmethods__={"run_batch"}))

    library.version.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setattr("importlib.import_module", imported)
    with pytest.raises(
        EngineError, match=r"vLLM 0\.33\.9 has another interface of executors \(.*\): install vllm>"
    ):
        library.check_timed_executor()
    library.version.cache_clear()


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
