"""Where do the defaults lose against another policy, and by which mechanism?

Simulated. All variants of a scene get the same requests at the same times, and complete them all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from experiments.common.config import as_json
from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from experiments.decisions.workloads import WORKLOADS
from experiments.placement.sessions import SESSIONS, ConversationSettings, conversations
from experiments.policies.grid import PolicyVariant
from serve_app.core.settings_base import at_least, settings, share_below
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import ONE_POOL, FleetSettings, RunSettings, SloByLength, simulate
from serve_app.lab.workloads import Trace, TraceChoice

CHAT = "chat"


@settings
class Scene:
    """Traffic and engines.

    Attributes:
        rates_per_s: requests per second by load.
        short_at_tokens: longest short prompt.
        max_model_len: of the engines; None for the profile's.
        explained: by load, the causes that are played because ours loses there.
    """

    workload: str
    profile: str
    replicas: int
    rates_per_s: Mapping[float, float]
    requests: Annotated[int, at_least(1)]
    short_at_tokens: int
    max_model_len: int | None = None
    explained: Mapping[float, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = (CHAT, *SESSIONS, *WORKLOADS)
        if self.workload not in known:
            raise SettingsError(f"no workload {self.workload!r}: there are {', '.join(known)}")


@settings
class DefaultsSettings:
    """Settings of the experiment.

    Attributes:
        variants: policies that every scene compares, by their names in the map.
        causes: ours without one of its parts.
        seeds: runs of each. Others were used for the choice of the defaults.
        warm_up_ratio: share of requests that is not measured. Sessions take this long to become as many as
            they remain.
    """

    scenes: Mapping[str, Scene]
    variants: Mapping[str, PolicyVariant]
    causes: Mapping[str, PolicyVariant]
    seeds: tuple[int, ...]
    warm_up_ratio: Annotated[float, share_below(1)]

    def __post_init__(self) -> None:
        named = {
            name for scene in self.scenes.values() for names in scene.explained.values() for name in names
        }
        if unknown := named - self.causes.keys():
            raise SettingsError(f"no cause {', '.join(sorted(unknown))}: there are {', '.join(self.causes)}")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Generator of a scene's requests, which `TraceChoice.change` calls in place of a trace by name."""

    workload: str
    requests: int
    rate_per_s: float
    warm_up_ratio: float

    def __call__(self, _trace: Trace, seed: int) -> Trace:
        """Return the requests of a seed, whose mean rate after the warm-up is `rate_per_s`."""
        trace = self._trace(seed)
        times = [one.arrival_s for one in trace.requests]
        first = round(self.warm_up_ratio * len(times))
        scale = (len(times) - 1 - first) / (times[-1] - times[first]) / self.rate_per_s
        requests = tuple(replace(one, arrival_s=scale * one.arrival_s) for one in trace.requests)
        return replace(trace, requests=requests)

    def _trace(self, seed: int) -> Trace:
        if self.workload == CHAT:
            return conversations(self.requests, self.rate_per_s, seed, ConversationSettings())
        if self.workload in SESSIONS:
            return SESSIONS[self.workload].trace(self.requests, self.rate_per_s, seed)
        return WORKLOADS[self.workload].draw(seed, self.rate_per_s, self.requests)


def play(experiment: DefaultsSettings, context: Context) -> Iterator[Measurement]:
    """Measure every variant of every scene at every load."""
    cells = [
        Cell(
            key={"scene": name, "load": load, "policy": label},
            runs=[_run(experiment, scene, load, label, variant, seed) for seed in experiment.seeds],
            seeds=experiment.seeds,
            traces=generated(scene.workload),
            settings=as_json(
                replace(
                    experiment,
                    scenes={name: replace(scene, explained={})},
                    variants={label: variant},
                    causes={},
                )
            ),
        )
        for name, scene in experiment.scenes.items()
        for load in scene.rates_per_s
        for label, variant in _variants(experiment, scene, load).items()
    ]
    return play_cells("defaults", cells, figures_of, context)


def _variants(experiment: DefaultsSettings, scene: Scene, load: float) -> Mapping[str, PolicyVariant]:
    causes = {name: experiment.causes[name] for name in scene.explained.get(load, ())}
    return {**experiment.variants, **causes}


def _run(
    experiment: DefaultsSettings, scene: Scene, load: float, label: str, variant: PolicyVariant, seed: int
) -> RunSettings:
    rate_per_s = scene.rates_per_s[load]
    drawn = Drawn(scene.workload, scene.requests, rate_per_s, experiment.warm_up_ratio)
    engine = replace(variant.engine, max_model_len=scene.max_model_len)
    return RunSettings(
        policy=variant.policy or label,
        label=label,
        fleet=FleetSettings(profile=scene.profile, replicas={ONE_POOL: scene.replicas}, engine=engine),
        # `Drawn` replaces the named trace.
        trace=TraceChoice(name="paper-mix", requests=1, change=drawn),
        seed=seed,
        load=load,
        scheduler=variant.scheduler,
        partition=variant.partition,
        slo=SloByLength(short_at_tokens=scene.short_at_tokens),
        short_at_tokens=scene.short_at_tokens,
        warm_up_ratio=experiment.warm_up_ratio,
    )


def figures_of(run: RunSettings) -> dict[str, float | None]:
    """Play a run, and return its figures."""
    result = simulate(run)
    summary, measured = result.summary, result.measured
    short, long = summary.ttft_s.short, summary.ttft_s.long
    return {
        "goodput": sum(run.slo.met_by(one) for one in measured) / len(measured),
        "short_ttft_mean_s": short.mean,
        "short_ttft_p99_s": short.p99,
        "long_ttft_mean_s": long.mean,
        "long_ttft_p99_s": long.p99,
        "tpot_mean_s": summary.tpot_s.all.mean,
        "queue_wait_max_s": summary.queue_wait_s.all.max,
        "tokens_per_s": result.whole.throughput_tokens_per_s,
        "preemptions": result.whole.preemptions,
        "unserved": len(result.records) - result.whole.completed,
    }


EXPERIMENT = Experiment(settings=DefaultsSettings, play=play)
