"""Servers that expose nothing, beside clients without a scheduler."""

from dataclasses import replace

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.strangers.run import (
    ALTERNATE,
    CONFIGURED,
    LEAST,
    OURS,
    Figures,
    Run,
    StrangersSettings,
    play_run,
)

SETTINGS = replace(
    read_settings(Catalogue().config("strangers"), StrangersSettings), seconds=90.0, least_requests=600
)


def played(case: str, load: float, variant: str, seed: int = 301) -> Figures:
    return play_run(Run(SETTINGS, SETTINGS.cases[case], load, variant, seed))


@pytest.mark.parametrize("load", [0.3, 1.3])
@pytest.mark.parametrize("case", [name for name in SETTINGS.cases if name.startswith("unlimited")])
def test_in_front_of_servers_without_a_limit_it_costs_nothing(case: str, load: float) -> None:
    ours = played(case, load, OURS)
    direct = [played(case, load, variant) for variant in (ALTERNATE, LEAST)]
    assert ours["completed"] == direct[0]["completed"]
    assert ours["mean_s"] <= 1.05 * min(each["mean_s"] for each in direct)
    assert ours["p99_s"] <= 1.15 * min(each["p99_s"] for each in direct)
    assert ours["cold_mean_s"] <= 1.3 * min(each["cold_mean_s"] for each in direct)
    assert ours["done_tokens"] >= 0.98 * max(each["done_tokens"] for each in direct)


@pytest.mark.parametrize("case", ["4 slots, sigma 0.5", "16 slots, fixed", "16 slots, unlike"])
def test_beyond_the_limit_it_serves_light_tenants_nearly_as_with_a_configured_limit(case: str) -> None:
    ours, configured, direct = (played(case, 1.3, variant) for variant in (OURS, CONFIGURED, LEAST))
    assert ours["completed"] == direct["completed"]
    assert ours["done_tokens"] >= 0.97 * direct["done_tokens"]
    # Without a scheduler they wait behind everyone, for many times as long.
    assert ours["light_mean_s"] < 1.6 * configured["light_mean_s"]
    assert ours["light_mean_s"] < 0.3 * direct["light_mean_s"]


def test_what_a_provider_rejects_is_completed_later() -> None:
    for case in ("429 beyond 16 at once", "429 beyond 300,000 tokens a minute"):
        ours, direct = played(case, 1.3, OURS), played(case, 1.3, LEAST)
        assert ours["completed"] > direct["completed"]
        assert ours["done_tokens"] >= 0.98 * direct["done_tokens"]
