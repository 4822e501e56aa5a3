"""Failed starts: the reason in one paragraph, with the engine's own message, and deaths of processes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ray import serve
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
    ServeStatus,
)

from serve_app.cli.serve.cluster import Cluster
from serve_app.cli.serve.failures import Stages, reason_of
from serve_app.cli.serve.processes import HostJob
from serve_app.errors import ServeAppError

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


# -- processes that die during a start: Serve replaces them, and the start continues ----------------------

# Serve's message about a replica that got SIGKILL in its constructor, and about one whose constructor raised.
KILLED = """A replica failed to start with exception. Retrying 2 more time(s). Error:
Traceback (most recent call last):
  File "deployment_state.py", line 1, in check_ready
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
    class_name: ServeReplica:app:short-demo
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR
"""
RAISED = """A replica failed to start with exception. Retrying 2 more time(s). Error:
Traceback (most recent call last):
ray.exceptions.RayTaskError(EngineError): ray::ServeReplica:app:short-demo.initialize_and_get_metadata()
serve_app.errors.EngineError: vLLM could not start m: no such model
"""
DIED = "A replica's health check failed. Deployment will be recovered."

SetStatus = Callable[[DeploymentStatus, str], None]


@pytest.fixture
def set_status(monkeypatch: pytest.MonkeyPatch) -> SetStatus:
    """Return a function that sets Serve's status of the application's only deployment."""

    def change(status: DeploymentStatus, message: str = "") -> None:
        trigger = DeploymentStatusTrigger.UNSPECIFIED
        deployment = DeploymentStatusOverview(status, trigger, {}, message)
        of_application = {
            DeploymentStatus.HEALTHY: ApplicationStatus.RUNNING,
            DeploymentStatus.UNHEALTHY: ApplicationStatus.UNHEALTHY,
            DeploymentStatus.DEPLOY_FAILED: ApplicationStatus.DEPLOY_FAILED,
        }.get(status, ApplicationStatus.DEPLOYING)
        found = ApplicationStatusOverview(of_application, "", 0.0, {"short-demo": deployment})
        monkeypatch.setattr(serve, "status", lambda: ServeStatus(applications={"app": found}))

    return change


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    content = {"applications": [{"name": "app", "import_path": "serve_app.app:build_app"}]}
    job = HostJob(
        config="c", folder=str(tmp_path), url="http://127.0.0.1:1", engines={"short-demo": "emulated"}
    )
    return Cluster(job, content)


def test_a_process_that_was_killed_in_its_start_is_waited_for(
    cluster: Cluster, set_status: SetStatus
) -> None:
    set_status(DeploymentStatus.UPDATING, KILLED)
    assert cluster.progress().lines == ["short-demo 0/1 waiting for resources"]
    set_status(DeploymentStatus.HEALTHY, "")
    assert cluster.progress().ready == ["short-demo"]


def test_a_process_that_dies_after_its_start_is_waited_for(cluster: Cluster, set_status: SetStatus) -> None:
    set_status(DeploymentStatus.HEALTHY, "")
    cluster.progress()
    set_status(DeploymentStatus.UNHEALTHY, DIED)
    assert cluster.progress().lines
    assert cluster.progress().lines
    set_status(DeploymentStatus.HEALTHY, "")
    assert not cluster.progress().lines


def test_one_that_dies_again_and_again_fails_the_start(cluster: Cluster, set_status: SetStatus) -> None:
    for _ in range(3):
        set_status(DeploymentStatus.UNHEALTHY, DIED)
        cluster.progress()
        set_status(DeploymentStatus.HEALTHY, "")
        cluster.progress()
    set_status(DeploymentStatus.UNHEALTHY, DIED)
    with pytest.raises(ServeAppError, match="short-demo has died 4 times"):
        cluster.progress()


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (DeploymentStatus.UPDATING, RAISED, "vLLM could not start m: no such"),
        (DeploymentStatus.DEPLOY_FAILED, KILLED, "The actor died unexpectedly"),
    ],
    ids=["an engine does not start", "Serve stops retrying"],
)
def test_a_deployment_that_cannot_recover_fails_the_start_at_once(
    cluster: Cluster, set_status: SetStatus, status: DeploymentStatus, message: str, reason: str
) -> None:
    set_status(status, message)
    with pytest.raises(ServeAppError, match=f"short-demo did not start: {reason}"):
        cluster.progress()
