"""Sessions on replicas of unlike speed."""

from dataclasses import replace

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.unlike.run import ALIKE, KNOWN, LEARNED, Run, UnlikeSettings, Workload, play_run

SESSIONS = "code generation"


@pytest.mark.application
@pytest.mark.parametrize("metrics", [True, False])
def test_learned_speeds_serve_sessions_about_as_well_as_known_ones(metrics: bool) -> None:
    settings = read_settings(Catalogue().config("unlike"), UnlikeSettings)
    settings = replace(settings, workloads={SESSIONS: Workload(saturated_per_s=8.2, requests=1_500)})
    learned, known, alike = (
        play_run(Run(settings, SESSIONS, 0.9, metrics, variant, seed=7))
        for variant in (LEARNED, KNOWN, ALIKE)
    )
    assert learned["e2e_mean_s"] < 1.05 * known["e2e_mean_s"]
    assert learned["e2e_mean_s"] < 1.02 * alike["e2e_mean_s"]
    assert learned["ttft_mean_s"] < 1.1 * min(known["ttft_mean_s"], alike["ttft_mean_s"])
