"""Processes that die during a start: Serve replaces them, and the start continues."""

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
from serve_app.cli.serve.processes import HostJob
from serve_app.errors import ServeAppError

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
