from dataclasses import replace

import pytest

from serve_app.engines.model.roofline import load_profile
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import EngineChanges, FleetSettings, PoolChanges

LARGE = "llama2-70b-h100-tp4"
POOLS = {"short": 2, "long": 1}


def test_a_fleet_without_changes_is_the_profile() -> None:
    (plan,) = FleetSettings(profile=LARGE).plans()
    profile = load_profile(LARGE)
    assert plan.engine == profile.model_settings()
    assert plan.step_time == profile.step_time


def test_pools_may_differ_in_profile_and_engine() -> None:
    fleet = FleetSettings(
        profile=LARGE,
        replicas=POOLS,
        b_short_tokens=4_096,
        engine=EngineChanges(max_num_seqs=64),
        by_pool={
            "short": PoolChanges(profile="laptop", engine=EngineChanges(max_num_seqs=32, kv_tokens=50_000)),
            "long": PoolChanges(engine=EngineChanges(max_num_batched_tokens=4_096)),
        },
    )
    short, _, long = fleet.plans()
    assert (short.pool, short.engine.max_num_seqs, short.engine.kv_tokens) == ("short", 32, 50_000)
    assert short.engine.max_model_len == 4_096
    assert short.step_time == load_profile("laptop").step_time
    assert (long.pool, long.engine.max_num_seqs, long.engine.max_num_batched_tokens) == ("long", 64, 4_096)
    assert long.engine.max_model_len == load_profile(LARGE).max_model_len
    assert fleet.gpus == 2 * 1 + 4
    assert [fleet.profile_of(pool) for pool in POOLS] == ["laptop", LARGE]


def test_the_short_pool_has_its_own_context() -> None:
    own = {"short": PoolChanges(engine=EngineChanges(max_model_len=6_000))}
    fleet = FleetSettings(profile=LARGE, replicas=POOLS, b_short_tokens=4_096, by_pool=own)
    assert fleet.plans()[0].engine.max_model_len == 6_000
    assert fleet.routing.b_short_tokens == 4_096


def test_each_pool_gets_the_chunk_limit_of_its_own_profile() -> None:
    fleet = FleetSettings(profile=LARGE, replicas=POOLS, by_pool={"short": PoolChanges(profile="laptop")})
    limits = [plan.engine.long_prefill_token_threshold for plan in fleet.plans(isolated=True)]
    small, large = (load_profile(name).step_time.chunk_tokens() for name in ("laptop", LARGE))
    assert limits == [small, small, large]
    given = FleetSettings(profile=LARGE, engine=EngineChanges(long_prefill_token_threshold=0))
    assert given.plans(isolated=True)[0].engine.long_prefill_token_threshold == 0


def test_a_fleet_may_have_any_number_of_pools() -> None:
    contexts = {"small": 2_048, "middle": 4_096}
    by_pool = {
        name: PoolChanges(engine=EngineChanges(max_model_len=context)) for name, context in contexts.items()
    }
    by_pool["middle"] = replace(by_pool["middle"], cost=2.0, boundary_tokens=3_000)
    fleet = FleetSettings(
        profile=LARGE,
        replicas={"small": 2, "middle": 1, "large": 1},
        b_short_tokens=2_048,
        by_pool=by_pool,
    )
    assert [(plan.pool, plan.engine.max_model_len) for plan in fleet.plans()] == [
        ("small", 2_048),
        ("small", 2_048),
        ("middle", 4_096),
        ("large", load_profile(LARGE).max_model_len),
    ]
    routing = fleet.routing
    assert (routing.pools, routing.b_short_tokens) == (("small", "middle", "large"), 2_048)
    assert (routing.boundaries_tokens, routing.costs) == ((3_000,), (1.0, 2.0, 1.0))


def test_pools_that_are_not_in_the_order_of_their_contexts_are_rejected() -> None:
    own = {"a": PoolChanges(engine=EngineChanges(max_model_len=4_096))}
    own["b"] = PoolChanges(engine=EngineChanges(max_model_len=2_048))
    fleet = FleetSettings(profile=LARGE, replicas={"a": 1, "b": 1}, by_pool=own)
    with pytest.raises(SettingsError, match="4,096 in a before 2,048 in b"):
        fleet.plans()
    with pytest.raises(SettingsError, match="at least one pool"):
        FleetSettings(profile=LARGE, replicas={})


def test_changes_of_a_pool_that_there_is_not_are_rejected() -> None:
    with pytest.raises(SettingsError, match="no pool 'short' to change"):
        FleetSettings(profile=LARGE, by_pool={"short": PoolChanges()})
