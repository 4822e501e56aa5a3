"""Applications that experiments serve: their settings must be valid."""

import pytest

from experiments.common.application import serve_config
from experiments.late_users.run import model as late_users_model
from experiments.overhead.ours import application, remote_model
from experiments.overhead.system import Endpoints
from serve_app.settings.application import settings_of

MODELS = {
    "late users": late_users_model("tokens", "fcfs"),
    "overhead, light engines": remote_model(Endpoints((9_001, 9_002))),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_application_can_be_served(name: str) -> None:
    (application,) = serve_config("test", {"models": [MODELS[name]]})["applications"]
    (model,) = settings_of(application["args"]).models
    assert model.name == MODELS[name]["name"]


def test_the_application_whose_cost_is_measured_requires_keys() -> None:
    (found,) = application(MODELS["overhead, light engines"])["applications"]
    settings = settings_of(found["args"])
    assert [key.tenant for key in settings.gateway.keys] == ["bench-0"]
    assert [pool.name for pool in settings.models[0].pools] == ["short", "long"]
