"""How is capacity shared among tenants and classes in overload?

The scenes are: tenants of different weight, a heavy tenant beside light ones, and queues in the engines. Each
is simulated with the paper's mix of lengths. Load 1.0 is the rate that saturates the same replicas under
FCFS. Times are TTFT from arrival.
"""

from collections.abc import Iterator
from dataclasses import replace

from experiments.common.config import as_json
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.common.rows import Key
from experiments.fairness.scenes import SCENES, FairnessSettings, Figures, Play
from serve_app.cli.command import progress_bar
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import parallel


def play(settings: FairnessSettings, context: Context) -> Iterator[Measurement]:
    """Measure every variant of every scene."""
    if unknown := [name for name in settings.scenes if name not in SCENES]:
        raise SettingsError(f"no scene {', '.join(unknown)}: there are {', '.join(SCENES)}")
    cells = [(scene, name) for scene, variants in settings.scenes.items() for name in variants]
    with progress_bar("fairness", len(cells)) as advance:
        for scene, name in cells:
            key: Key = {"scene": scene, "variant": name}
            if not context.has(key):
                variant = settings.scenes[scene][name]
                seeds = range(settings.seeds[scene])
                runs = [(scene, Play(settings, variant, seed)) for seed in seeds]
                figures = list(parallel(_figures, runs, context.jobs))
                yield Measurement(
                    key=key,
                    figures={figure: [run[figure] for run in figures] for figure in figures[0]},
                    seeds=seeds,
                    traces=generated("paper-mix" if not scene.startswith("silent") else "short and long"),
                    settings=as_json(replace(settings, scenes={scene: {name: variant}})),
                )
            advance()


def _figures(run: tuple[str, Play]) -> Figures:
    scene, one = run
    return SCENES[scene](one)


EXPERIMENT = Experiment(settings=FairnessSettings, play=play)
