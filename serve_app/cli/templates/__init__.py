"""Templates of configurations: copies of files in `configs`, because only files of the package are installed.

Tests keep both equal.
"""

from pathlib import Path

EMULATED = Path(__file__).with_name("local.yaml")
GPUS = Path(__file__).with_name("gpu_1x.yaml")
