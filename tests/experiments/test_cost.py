"""Cost experiment: its variants and its figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from experiments.common.peers import Endpoints
from experiments.common.rows import Row
from experiments.cost.tables import prices_us
from experiments.cost.variants import BASE, CONTROL, VARIANTS
from serve_app.core.settings_base import plain
from serve_app.settings.application import ApplicationSettings, settings_of
from tests.experiments.builders import row

ENDPOINTS = Endpoints((9_001, 9_002))


def resolved(name: str) -> ApplicationSettings:
    (application,) = VARIANTS[name].configuration(ENDPOINTS, "/folder")["applications"]
    return settings_of(application["args"])


def changed(name: str) -> dict[str, Any]:
    """Return the settings of a variant that differ from the base, by their path."""
    base, variant = (dict(leaves(plain(resolved(each)), "")) for each in (BASE, name))
    # What gateways know of the models is derived from these.
    paths = {*base, *variant} - {"gateway.models"}
    return {path: variant.get(path) for path in paths if base.get(path) != variant.get(path)}


def leaves(value: Any, path: str) -> Any:
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from leaves(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and path == "models":
        for each in value:
            yield from leaves(each, "models[]")
    else:
        yield path, value


def test_the_base_has_one_key_and_two_pools() -> None:
    base = resolved(BASE)
    assert [key.tenant for key in base.gateway.keys] == ["bench-0"]
    assert [pool.name for pool in base.models[0].pools] == ["short", "long"]


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.setting])
def test_a_variant_differs_from_the_base_only_in_the_setting_of_its_table(name: str) -> None:
    setting = VARIANTS[name].setting.replace(".advanced", "")
    differences = changed(name)
    assert differences
    assert all(path.startswith(setting) for path in differences), differences


def test_other_variants_differ_in_their_keys_or_in_nothing() -> None:
    assert changed(CONTROL) == {}
    assert changed("100 programs") == {}
    keys = changed("1,000 tenants")["gateway.keys"]
    assert {key["tenant"] for key in keys} == {f"bench-{number}" for number in range(1_000)}


def figures(gateway: Sequence[float], scheduler: Sequence[float]) -> dict[str, Any]:
    return {"cpu_ms": {"gateway": gateway, "scheduler": scheduler, "tuner": [9.0] * len(gateway)}}


def feature_row(name: str, base: dict[str, Any], variant: dict[str, Any]) -> Row:
    settings = {"blocks": 2, "cycles": {"small": 10}, "burst": {"small": 32}, "clients": 16}
    key = {"part": "feature", "feature": name, "kind": "small"}
    return row(key, {"base": base, "variant": variant}, experiment="cost", settings=settings)


def test_the_price_of_a_feature_is_what_it_adds_whichever_side_has_it() -> None:
    cheap, dear = figures([0.2, 0.2], [0.1, 0.2]), figures([0.2, 0.3], [0.15, 0.2])
    assert prices_us(feature_row("keys", dear, cheap)) == pytest.approx([50, 100])
    assert prices_us(feature_row("decision log", cheap, dear)) == pytest.approx([50, 100])
    assert prices_us(feature_row("decision log", cheap, dear), ("scheduler",)) == pytest.approx([50, 0])
