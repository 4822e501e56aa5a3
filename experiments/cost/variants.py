"""Applications that differ from the base in one feature, or in their tenants or sessions."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.common.config import merged
from experiments.common.peers import HOST, Endpoints, System
from experiments.overhead.peers import application, remote_model, started_application

BASE = "base"
# Searches use a quarter of a core, and would disturb all measurements.
_NO_SEARCHES = {"tuner": {"advanced": {"min_requests": 1_000_000_000}}}
CONTROL = "none: the same configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One difference from the base, which is the default configuration with one key.

    Attributes:
        setting: that switches the feature, for tables.
        is_addition: whether the variant has the feature and the base lacks it.
        gateway, model: settings that are merged into those of the base.
        tenants: number of keys, each of another tenant.
        sessions: number of sessions that requests name in turn.
    """

    setting: str = ""
    is_addition: bool = False
    gateway: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    tenants: int = 1
    sessions: int = 0

    @property
    def is_feature(self) -> bool:
        """Return whether it differs in a setting rather than in tenants or sessions."""
        return self.tenants == 1 and not self.sessions

    def configuration(self, endpoints: Endpoints, folder: str) -> dict[str, Any]:
        """Return the configuration of `serve run`.

        Args:
            folder: for files that the application writes.
        """
        model = merged(remote_model(endpoints), _NO_SEARCHES)
        config = application(model, self.tenants)
        args = config["applications"][0]["args"]
        args["gateway"] = merged(args["gateway"], self.gateway)
        args["models"] = [merged(args["models"][0], self.model)]
        if log := args["models"][0].get("decision_log"):
            args["models"][0]["decision_log"] = {"path": f"{folder}/{log['path']}"}
        return config


@contextlib.contextmanager
def started_variant(name: str, endpoints: Endpoints, collector_port: int) -> Iterator[System]:
    """Start the application of a variant; `collector_port` receives its traces, if it sends any."""
    variant = VARIANTS[name]
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{collector_port}"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        config = variant.configuration(endpoints, folder)
        with started_application(name, config, environment) as system:
            yield replace(system, tenants=variant.tenants, sessions=variant.sessions)


def _scheduler(**settings: Any) -> dict[str, Any]:
    return {"scheduler": settings}


VARIANTS: Mapping[str, Variant] = {
    BASE: Variant(),
    CONTROL: Variant(),
    "keys": Variant(setting="gateway.keys", gateway={"keys": []}),
    "log line per request": Variant(
        setting="gateway.advanced.log_requests", gateway={"advanced": {"log_requests": False}}
    ),
    "prefix affinity": Variant(
        setting="models[].scheduler.advanced.affinity.enabled",
        model=_scheduler(advanced={"affinity": {"enabled": False}}),
    ),
    "programs": Variant(
        setting="models[].scheduler.programs.enabled", model=_scheduler(programs={"enabled": False})
    ),
    "fair shares": Variant(
        setting="models[].scheduler.fairness.mode", model=_scheduler(fairness={"mode": "off"})
    ),
    "tuner": Variant(setting="models[].tuner.mode", model={"tuner": {"mode": False}}),
    "length queues and tuner": Variant(setting="models[].scheduler.policy", model=_scheduler(policy="fcfs")),
    "scheduling": Variant(setting="models[].scheduler.active_share", model=_scheduler(active_share=0.0)),
    "tracing of every request": Variant(
        setting="gateway.tracing", is_addition=True, gateway={"tracing": True}
    ),
    "decision log": Variant(
        setting="models[].decision_log",
        is_addition=True,
        model={"decision_log": {"path": "decisions-{incarnation}.log"}},
    ),
    "continued streams": Variant(
        setting="models[].resume_streams", is_addition=True, model={"resume_streams": True}
    ),
    "10 tenants": Variant(tenants=10),
    "1,000 tenants": Variant(tenants=1_000),
    "100 programs": Variant(sessions=100),
    "1,000 programs": Variant(sessions=1_000),
}
