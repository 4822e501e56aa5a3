"""What does a GPU cost per hour? A small table that its user edits."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.engine_model.profiles import load_profile
from serve_app.errors import SettingsError
from serve_app.settings_base import POSITIVE, settings

_DATA = resources.files("serve_app.planning") / "data" / "gpu_costs.yaml"


@settings
class GpuCost:
    """What one kind of GPU costs.

    Attributes:
        usd_per_hour: of one GPU.
        source: kind of source, such as a list price, a contract, an estimate.
        date: when the source said so, year and month.
    """

    usd_per_hour: Annotated[float, POSITIVE]
    source: str
    date: str


_ADAPTER = TypeAdapter(dict[str, GpuCost])


class CostTable:
    """Prices by GPU, for whole engines."""

    def __init__(self, costs: Mapping[str, GpuCost]) -> None:
        self.costs = dict(costs)

    @classmethod
    def load(cls, path: Path | None = None) -> "CostTable":
        """The table in that file, or the one that comes with the package.

        Raises:
            SettingsError: the file is none.
        """
        try:
            text = _DATA.read_text("utf-8") if path is None else path.read_text("utf-8")
            return cls(_ADAPTER.validate_python(yaml.safe_load(text)))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise SettingsError(f"{path} is not a table of GPU costs: {error}") from error

    def gpu_of(self, profile: str) -> str:
        """Which GPU a profile is for, from its name `model-gpu-tpN`.

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
        """Of one engine of this profile, with all its GPUs."""
        return load_profile(profile).gpus * self.costs[self.gpu_of(profile)].usd_per_hour
