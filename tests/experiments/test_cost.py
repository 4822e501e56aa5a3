"""Cost experiment: its variants and its figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from experiments.common.rows import Row
from experiments.cost.tables import PICTURES, TABLES, prices_us
from experiments.cost.variants import BASE, CONTROL, VARIANTS
from experiments.overhead.system import Endpoints
from serve_app.core.settings_base import plain
from serve_app.settings.application import settings_of
from tests.experiments.builders import row

ENDPOINTS = Endpoints((9_001, 9_002))


def changed(name: str) -> dict[str, Any]:
    """Return the settings of a variant that differ from the base, by their path."""
    found = []
    for each in (BASE, name):
        (application,) = VARIANTS[each].configuration(ENDPOINTS, "/folder")["applications"]
        found.append(dict(leaves(plain(settings_of(application["args"])), "")))
    base, variant = found
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


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.setting])
def test_a_variant_differs_from_the_base_only_in_the_setting_of_its_table(name: str) -> None:
    setting = VARIANTS[name].setting.replace(".advanced", "")
    differences = changed(name)
    assert differences
    assert all(path.startswith(setting) for path in differences), differences


def test_other_variants_differ_in_their_keys_or_in_nothing() -> None:
    assert changed(CONTROL) == {}
    assert changed("100 programs") == {}
    assert len(changed("1,000 tenants")["gateway.keys"]) == 1_000


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


def test_the_table_lists_features_by_their_price_and_no_tenants() -> None:
    cheap, dear = figures([0.2, 0.2], [0.1, 0.1]), figures([0.3, 0.3], [0.2, 0.2])
    rows = [
        feature_row("keys", cheap, cheap),
        feature_row("decision log", cheap, dear),
        feature_row("10 tenants", cheap, dear),
    ]
    lines = TABLES["features"].written(rows).splitlines()
    assert lines[2:4] == [
        "| decision log | `models[].decision_log` | 200 ± 0 |",
        "| keys | `gateway.keys` | 0 ± 0 |",
    ]
    assert "The default configuration costs: small 300 µs." in lines[5]


def test_the_picture_has_a_panel_for_each_sweep() -> None:
    rows = [
        row({"part": part, "value": value}, figures([value / 1_000], [0.05]))
        for part in ("chunks", "body_bytes")
        for value in (111, 4_000)
    ]
    rows += [
        feature_row(name, figures([0.25], [0.125]), figures([0.375], [0.5]))
        for name in ("10 tenants", "1,000 tenants", "100 programs", "1,000 programs")
    ]
    core = {"events_us": {"arrival": {"mean": 70.0}}, "all_us": 500.0, "requests": 2}
    ceiling = [
        row({"part": "events", "replicas": 10}, core),
        row({"part": "waiting", "waiting": 100}, core),
    ]
    (picture,) = PICTURES.values()
    svg = picture({"cost": rows, "ceiling": ceiling}.__getitem__)
    assert svg.count('class="title"') == 5
    for text in ("gateway", "scheduler", "0.11", "4", "111", "4,000", "0.07", "0.25", "1,000"):
        assert f">{text}</text>" in svg, text
