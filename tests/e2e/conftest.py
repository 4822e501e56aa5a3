from collections.abc import Iterator

import pytest

from tests.e2e.served import Served, serve

# Two gateways and two short replicas, so that one of each may die. At 4 ms a step, an answer of 1,500 tokens
# takes six seconds: long enough to be interrupted.
ARGS = {
    "models": [
        {
            "name": "demo",
            "aliases": ["demo-alias"],
            "pools": [
                {
                    "name": "short",
                    "engine": {"emulated": {"profile": "laptop", "max_model_len": 2048}},
                    "replicas": 2,
                    "resources": {"num_cpus": 0.1},
                    "drain_timeout_s": 10.0,
                },
                {
                    "name": "long",
                    "engine": {"emulated": {"profile": "laptop", "max_model_len": 8192}},
                    "resources": {"num_cpus": 0.1},
                    "drain_timeout_s": 10.0,
                },
            ],
            "scheduler": {"routing": {"b_short_tokens": 2000, "spill": True}, "max_waiting": 300},
        }
    ],
    "gateways": {"replicas": 2, "num_cpus": 0.1, "drain_timeout_s": 10.0},
}


@pytest.fixture(scope="session")
def running() -> Iterator[Served]:
    """One application for all tests of this folder; those that kill a part of it wait until it is back."""
    with serve(ARGS) as served:
        yield served


@pytest.fixture
def app(running: Served) -> Served:
    """The application, ready."""
    running.wait_until_ready()
    return running
