from pathlib import Path

import pytest

from serve_app.cli import main
from serve_app.lab.simulation.partitions import read_partition


def queues(policy: str, folder: Path) -> int:
    """Return the number of queues that a simulated run of a policy has learned."""
    out = folder / f"{policy}.yaml"
    arguments = ["--trace", "paper-mix", "--requests", "1100", "--rate", "9", "--jobs", "1"]
    assert main(["simulate", *arguments, "--policy", policy, "--save-partition", str(out)]) == 0
    return len(read_partition(out))


@pytest.mark.slow
def test_the_published_policy_has_the_published_queues(tmp_path: Path) -> None:
    assert queues("ewsjf-paper", tmp_path) > 2 * queues("ewsjf", tmp_path)
