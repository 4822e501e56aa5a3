"""Prices of GPUs per hour: a table that users may replace by their own."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.engine_model.profiles import load_profile
from serve_app.errors import SettingsError
from serve_app.settings_base import POSITIVE, settings

_DATA = resources.files("serve_app.planning.sizing") / "gpu_costs.yaml"


@settings
class GpuCost:
    """The price of one kind of GPU.

    Attributes:
        usd_per_hour: of one GPU.
        source: of the price, such as a list price, a contract or an estimate.
        date: year and month of the price.
    """

    usd_per_hour: Annotated[float, POSITIVE]
    source: str
    date: str


_ADAPTER = TypeAdapter(dict[str, GpuCost])


class CostTable:
    """Prices of engines, by the GPUs that they need."""

    def __init__(self, costs: Mapping[str, GpuCost]) -> None:
        self.costs = dict(costs)

    @classmethod
    def load(cls, path: Path | None = None) -> "CostTable":
        """The table in a file, or that of the package.

        Raises:
            SettingsError: the file does not hold such a table.
        """
        try:
            text = _DATA.read_text("utf-8") if path is None else path.read_text("utf-8")
            return cls(_ADAPTER.validate_python(yaml.safe_load(text)))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise SettingsError(f"{path} is not a table of GPU costs: {error}") from error

    def gpu_of(self, profile: str) -> str:
        """The GPU of a profile, from its name `model-gpu-tpN`.

        Raises:
            SettingsError: the table has no GPU of that name.
        """
        name = Path(profile).name.removesuffix(".yaml").removesuffix(".yml")
        for part in reversed(name.split("-")):
            if part in self.costs:
                return part
        raise SettingsError(
            f"no cost for the GPU of profile {profile!r}: name it model-gpu-tpN with a GPU of "
            f"{', '.join(sorted(self.costs))}, or add its GPU to a table of your own (--costs FILE)"
        )

    def usd_per_hour(self, profile: str) -> float:
        """The price of one engine of a profile, with all its GPUs."""
        return load_profile(profile).gpus * self.costs[self.gpu_of(profile)].usd_per_hour
