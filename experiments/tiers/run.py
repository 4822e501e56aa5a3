"""What do three context tiers bring against two pools of the same price?

A model with a long context is asked chats, documents and a few books. Short prompts are served on cheap GPUs.
The dear ones hold longer contexts, and are one pool or two tiers. With two, no document waits behind a book,
and a book has fewer GPUs. All fleets meet the same requests at the same times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.common.rows import Key
from experiments.tiers.settings import TiersExperiment, usd_per_hour
from serve_app.command import progress_bar
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.statistics import percentile
from serve_app.simulation.batch import parallel
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.workload import Disclosure, fit, requests_of


@dataclass(frozen=True, slots=True)
class Run:
    """One fleet at one rate with one seed."""

    experiment: TiersExperiment
    fleet: str
    rate_per_s: float
    seed: int

    @property
    def key(self) -> Key:
        """What its row is found by."""
        return {"rate_per_s": self.rate_per_s, "fleet": self.fleet}


def play(experiment: TiersExperiment, context: Context) -> Iterator[Measurement]:
    """Every rate and fleet that there is no row of yet."""
    cells = [
        Run(experiment, fleet, rate, 0) for rate in experiment.rates_per_s for fleet in experiment.fleets
    ]
    cells = [cell for cell in cells if not context.has(cell.key)]
    seeds = range(experiment.seeds)
    with progress_bar("tiers", len(cells)) as advance:
        for cell in cells:
            runs = [Run(experiment, cell.fleet, cell.rate_per_s, seed) for seed in seeds]
            found = list(parallel(_played, runs, context.jobs))
            yield Measurement(
                key=cell.key,
                seeds=seeds,
                traces=generated("chats, documents and books"),
                figures={
                    "usd_per_hour": usd_per_hour(experiment.fleets[cell.fleet]),
                    **{name: [one[name] for one in found] for name in found[0]},
                },
            )
            advance()


def _played(run: Run) -> dict[str, Any]:
    experiment, fleet = run.experiment, run.experiment.fleets[run.fleet]
    plans = fleet.plans(isolated=True)
    trace = fit(
        experiment.trace(run.rate_per_s, run.seed), max(plan.engine.max_model_len for plan in plans)
    ).trace
    simulation = Simulation(scheduler_settings(experiment.policy, fleet.routing, {}), plans)
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    records = sorted(simulation.run(requests), key=lambda record: record.arrived_at)
    measured = records[round(experiment.warm_up_ratio * len(records)) :]
    span_s = measured[-1].arrived_at - measured[0].arrived_at
    figures: dict[str, Any] = {
        "completed": sum(record.completed for record in records) / len(records),
        "goodput_per_s": sum(_meets(experiment, record) for record in measured) / span_s,
        **_ttft("all", measured),
    }
    for kind in experiment.kinds:
        mine = [record for record in measured if experiment.kind_of(record.prompt_tokens) == kind]
        figures |= _ttft(kind, mine)
        figures[f"{kind}_goodput_ratio"] = sum(_meets(experiment, one) for one in mine) / max(1, len(mine))
    return figures


def _ttft(kind: str, records: Sequence[RequestRecord]) -> dict[str, float | None]:
    times = sorted(record.ttft_s for record in records if record.ttft_s is not None)
    return {f"{kind}_ttft_p{share}_s": percentile(times, share) if times else None for share in (50, 99)}


def _meets(experiment: TiersExperiment, record: RequestRecord) -> bool:
    limit_s = experiment.kinds[experiment.kind_of(record.prompt_tokens)].ttft_s
    in_time = record.completed and record.ttft_s is not None and record.ttft_s <= limit_s
    return in_time and (record.tpot_s is None or record.tpot_s <= experiment.tpot_s)


EXPERIMENT = Experiment(settings=TiersExperiment, play=play)
