"""Reason of a failed start: one paragraph, with the engine's own message if there is one."""

from pathlib import Path

import pytest

from serve_app.cli.serve.failures import Stages, reason_of

SERVE_SAYS = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:ewsjf:only-bad.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "replica.py", line 1, in start
    raise EngineError(
serve_app.errors.EngineError: vLLM could not start m: Engine core initialization failed. See root cause \
above. Failed core proc(s): {}: see its log lines above for the cause
"""

ENGINE_SAYS = """:job_id:01000000
:actor_name:ServeReplica:ewsjf:only-bad
(EngineCore pid=2) INFO 11-22 22:08:00 [core.py:1] Initializing a V1 LLM engine
(Worker pid=3) INFO 11-22 22:08:01 [cpu_model_runner.py:68] Starting to load model m...
(Worker pid=3) ERROR 11-22 22:08:04 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=3) ERROR 11-22 22:08:04 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=3) ERROR 11-22 22:08:04 [executor.py:953] safetensors.SafetensorError: incomplete metadata
(EngineCore pid=2) ERROR 11-22 22:08:09 [core.py:1510] Exception: WorkerProc initialization failed.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logs = tmp_path / "ray/session_latest/logs"
    logs.mkdir(parents=True)
    (logs / "worker-1-01000000-1.err").write_text(ENGINE_SAYS)
    (logs / "worker-2-01000000-2.err").write_text(
        ":actor_name:ServeReplica:ewsjf:other\nERROR 1] ValueError: no\n"
    )
    return tmp_path


def test_the_engines_own_error_replaces_a_pointer_to_it(folder: Path) -> None:
    assert reason_of("only-bad", SERVE_SAYS, folder) == (
        "only-bad did not start: vLLM could not start m: SafetensorError: incomplete metadata"
    )


def test_without_a_log_of_its_engine_the_error_of_the_deployment_is_shown(tmp_path: Path) -> None:
    message = "Error:\nTraceback\nserve_app.errors.EngineError: http://h:1 gave no answer: rejected\n"
    assert reason_of("only-bad", message, tmp_path) == (
        "only-bad did not start: http://h:1 gave no answer: rejected"
    )


def test_a_message_without_an_error_is_shown_unchanged(tmp_path: Path) -> None:
    assert reason_of("gateway", "no node has 4 CPUs", tmp_path) == "gateway did not start: no node has 4 CPUs"


def test_the_stage_is_the_last_that_the_deployments_engine_has_logged(folder: Path) -> None:
    stages = Stages(folder)
    assert stages.of("only-bad") == "loading weights"
    assert stages.of("other") == ""
    assert stages.of("nothere") == ""
