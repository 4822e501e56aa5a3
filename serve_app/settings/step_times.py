"""How fast the engines of a model are, as far as its settings say: for replays of recorded minutes."""

from collections.abc import Iterator

from serve_app.engine_model.profiles import load_profile
from serve_app.engine_model.step_time import StepTimeModel
from serve_app.settings.application import ModelSettings


def step_times_of(model: ModelSettings) -> dict[str, StepTimeModel]:
    """By pool: of emulated engines, and of others where the tuner is given a profile.

    Raises:
        SettingsError: there is no such profile.
    """
    return dict(_known(model))


def _known(model: ModelSettings) -> Iterator[tuple[str, StepTimeModel]]:
    profile = model.tuner.profile
    for pool in model.pools:
        emulated = pool.engine.emulated
        if emulated is not None:
            yield pool.name, load_profile(emulated.profile).step_time.scaled(1.0 / emulated.speed_up)
        elif profile is not None:
            yield pool.name, load_profile(profile).step_time
