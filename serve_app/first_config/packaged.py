"""The configuration with emulated engines, as an installation without a clone has it.

It is a copy of configs/local.yaml, because only what lies inside the package is installed with it; a test
holds the two together.
"""

from pathlib import Path

PACKAGED_CONFIG = Path(__file__).with_name("local.yaml")
_OF_A_CLONE = Path("configs/local.yaml")


def default_config() -> Path:
    """What `serve` serves when it is told nothing: a clone's file in the working directory, else ours."""
    return _OF_A_CLONE if _OF_A_CLONE.is_file() else PACKAGED_CONFIG
