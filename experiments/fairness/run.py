"""How is capacity shared among tenants and classes in overload?

The scenes are: tenants of different weight, a heavy tenant beside light ones, and queues in the engines. Each
is simulated with the paper's mix of lengths. Load 1.0 is the rate that saturates the same replicas under
FCFS. Times are TTFT from arrival.
"""

from collections.abc import Iterator
from dataclasses import replace

from experiments.common.config import as_json
from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from experiments.fairness.scenes import SCENES, FairnessSettings, Figures, Play
from serve_app.errors import SettingsError


def play(settings: FairnessSettings, context: Context) -> Iterator[Measurement]:
    """Measure every variant of every scene."""
    if unknown := [name for name in settings.scenes if name not in SCENES]:
        raise SettingsError(f"no scene {', '.join(unknown)}: there are {', '.join(SCENES)}")
    cells = [
        Cell(
            key={"scene": scene, "variant": name},
            runs=[(scene, Play(settings, variant, seed)) for seed in range(settings.seeds[scene])],
            seeds=range(settings.seeds[scene]),
            traces=generated("paper-mix" if not scene.startswith("silent") else "short and long"),
            settings=as_json(replace(settings, scenes={scene: {name: variant}})),
        )
        for scene, variants in settings.scenes.items()
        for name, variant in variants.items()
    ]
    return play_cells("fairness", cells, _figures, context)


def _figures(run: tuple[str, Play]) -> Figures:
    scene, one = run
    return SCENES[scene](one)


EXPERIMENT = Experiment(settings=FairnessSettings, play=play)
