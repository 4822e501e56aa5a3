"""The applications that experiments serve: their settings are what the application takes."""

from collections.abc import Mapping
from typing import Any

import pytest

from experiments.common.application import BUILD_APP, serve_config
from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.late_users.run import model as late_users_model
from experiments.live_tuning.application import model as live_tuning_model
from experiments.overhead.ours import application, remote_model, replica_model
from experiments.overhead.settings import OverheadSettings
from experiments.overhead.system import Endpoints
from experiments.tuner_cost.run import model as tuner_cost_model
from serve_app.settings.loading import settings_of

OVERHEAD = read_settings(Catalogue().config("overhead"), OverheadSettings)
MODELS = {
    "late users": late_users_model("tokens", "fcfs"),
    "overhead, light engines": remote_model(Endpoints((9_001, 9_002))),
    "overhead, own replica": replica_model(OVERHEAD.replicas.engine, OVERHEAD.replicas.engine_advanced),
    "tuner cost": tuner_cost_model(0.25),
    "winner": live_tuning_model("winner", 15.0),
    "poisoned": live_tuning_model("poisoned", 15.0),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_application_can_be_served(name: str) -> None:
    (application,) = serve_config("test", [MODELS[name]], BUILD_APP, 8_000)["applications"]
    (model,) = settings_of(application["args"]).models
    assert model.name == MODELS[name]["name"]


def test_the_case_winner_starts_from_what_the_poisoned_search_proposes() -> None:
    from experiments.live_tuning.poisoned_tuner import AWFUL

    def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in tree.items():
            found.update(leaves(value) if isinstance(value, Mapping) else {name: value})
        return found

    assert AWFUL.items() <= leaves(MODELS["winner"]["scheduler"]).items()


def test_the_application_whose_cost_is_measured_asks_for_keys() -> None:
    (found,) = application(MODELS["overhead, light engines"])["applications"]
    settings = settings_of(found["args"])
    assert [key.tenant for key in settings.gateway.keys] == ["bench"]
    assert [pool.name for pool in settings.models[0].pools] == ["short", "long"]
