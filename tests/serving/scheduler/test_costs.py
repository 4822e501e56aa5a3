import json
import time

import pytest

from serve_app.core import events as ev
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.routing.snapshot import decoded, encoded
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.scheduler import gauges as kept_costs
from serve_app.serving.scheduler.gauges import CostRow, PersistentCosts
from tests.builders import ManualDriver, one_replica


def busy() -> ManualDriver:
    """Return an engine that two tenants used: one for two seconds, one for one second."""
    driver = one_replica(backpressure=BackpressureSettings(report_limit_s=1_000.0))
    for tenant, seconds in (("heavy", 2.0), ("light", 1.0)):
        driver.arrive(tenant, tenant=tenant, prompt_tokens=1, priority=PriorityClass.BATCH)
        usage = Usage(prompt_tokens=1, output_tokens=5)
        driver.feed(ev.Finished(tenant, Outcome.COMPLETED, usage), after_s=seconds)
    return driver


def seconds(costs: PersistentCosts) -> dict[str, float]:
    """Return the engine time of each tenant as the cost document shows it."""
    return {row["tenant"]: row["engine_seconds"] for row in costs.document({})["rows"]}


def test_the_document_has_the_dearest_first_and_gpus_where_there_are_any() -> None:
    costs = PersistentCosts(time.time() - 60.0, (), ()).plus(busy().scheduler)
    document = costs.document({"only": 4.0})

    assert document["engine_seconds"] == 3.0
    assert document["counted_s"] == pytest.approx(60.0, abs=5.0)
    assert [(row["tenant"], row["engine_seconds"], row["gpu_seconds"]) for row in document["rows"]] == [
        ("heavy", 2.0, 8.0),
        ("light", 1.0, 4.0),
    ]
    assert sum(row["share"] for row in document["rows"]) == 1.0
    without = costs.document({"only": 0.0})
    assert [row["gpu_seconds"] for row in without["rows"]] == [None, None]


def test_counts_of_earlier_schedulers_are_added_and_survive_a_file() -> None:
    first = PersistentCosts(1_000.0, (), ()).plus(busy().scheduler)
    kept = decoded(json.loads(json.dumps(encoded(first))), PersistentCosts)
    again = kept.plus(busy().scheduler)

    assert again.since == 1_000.0
    assert seconds(again) == {"heavy": 4.0, "light": 2.0}
    assert seconds(kept) == {"heavy": 2.0, "light": 1.0}, "a look changes nothing"


def test_the_smallest_of_too_many_tenants_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs, "_MAX_TENANTS", 2)
    used = tuple(CostRow("only", "batch", f"t{number}", float(number)) for number in range(5))
    costs = PersistentCosts(time.time(), used, ()).plus(busy().scheduler)

    assert seconds(costs) == {"t4": 4.0, "t3": 3.0, "other": 2.0 + 2.0 + 1.0 + 1.0}


@pytest.mark.parametrize(
    "broken",
    [
        {"used": [], "imposed": []},
        {"since": 1.0, "used": [{"pool": "a", "class": "b", "tenant": "c", "seconds": -1.0}], "imposed": []},
        {"since": 1.0, "used": [{"pool": 1, "class": "b", "tenant": "c", "seconds": 1.0}], "imposed": []},
        {"since": 1.0, "used": []},
    ],
)
def test_a_damaged_state_is_rejected(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="learned state"):
        decoded(broken, PersistentCosts)
