"""What requests cost: the engines' time that they used, and the delay that they imposed on others."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.scheduling import Scheduler
from serve_app.serving.scheduler.scraped.labels import Names

Row = tuple[str, str, str, float]
"""Pool, class, tenant, and seconds so far."""


@dataclass(frozen=True, slots=True)
class CostFigures:
    """The sums at one moment.

    Attributes:
        used: time of engines.
        imposed: delay of other tenants' requests.
    """

    used: tuple[Row, ...] = ()
    imposed: tuple[Row, ...] = ()


def look_at_costs(core: Scheduler) -> CostFigures:
    """The sums as they are now; changes nothing."""
    used, imposed = (
        tuple((pool, priority.value, tenant, seconds) for pool, priority, tenant, seconds in totals)
        for totals in (core.in_flight.engine_time.used, core.waits.imposed)
    )
    return CostFigures(used, imposed)


class CostCounters(Collector):
    """The sums as they were last looked at."""

    def __init__(self, model: str, names: Names) -> None:
        self._model = model
        self._tenants = names.of_tenants
        self.figures = CostFigures()

    def __repr__(self) -> str:
        return f"<CostCounters {self._model}>"

    def collect(self) -> Iterator[Metric]:
        """Yield both families; prometheus_client asks for them at each page."""
        text = "Time that engines worked on the requests of a tenant that have left them."
        yield self._family("ewsjf_tenant_engine_seconds", text, self.figures.used)
        text = "Time for which requests of a tenant kept those of others waiting, summed over these."
        yield self._family("ewsjf_tenant_imposed_delay_seconds", text, self.figures.imposed)

    def _family(self, name: str, text: str, rows: tuple[Row, ...]) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model", "pool", "class", "tenant"))
        sums = defaultdict[tuple[str, str, str], float](float)
        for pool, priority, tenant, seconds in rows:
            sums[pool, priority, self._tenants(tenant)] += seconds
        for key, seconds in sums.items():
            family.add_metric((self._model, *key), seconds)
        return family
