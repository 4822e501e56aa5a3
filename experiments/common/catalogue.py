"""The experiments of a package: which there are, and the files of each."""

import ast
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.common.experiment import Experiment
from experiments.common.tables import Table
from serve_app.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Experiments are sub-packages that have a `run.py`.

    Attributes:
        package: that holds them, importable.
    """

    package: str = "experiments"

    @property
    def root(self) -> Path:
        """The package's folder."""
        return Path(str(importlib.import_module(self.package).__file__)).parent

    def names(self) -> list[str]:
        """All experiments, in order of their names."""
        return sorted(path.parent.name for path in self.root.glob(f"*/{Experiment.FILE}"))

    def folder(self, name: str) -> Path:
        """Where an experiment lives.

        Raises:
            SettingsError: there is no such experiment.
        """
        if name not in self.names():
            raise SettingsError(f"no experiment {name!r}: there are {', '.join(self.names())}")
        return self.root / name

    def experiment(self, name: str) -> Experiment[Any]:
        """What `run.py` defines."""
        found: Experiment[Any] = self._module(name, "run").EXPERIMENT
        return found

    def tables(self, name: str) -> Mapping[str, Table]:
        """What `tables.py` defines."""
        found: Mapping[str, Table] = self._module(name, "tables").TABLES
        return found

    def question(self, name: str) -> str:
        """The first line of what `run.py` says of itself; read, not imported, which takes seconds for all."""
        source = (self.folder(name) / Experiment.FILE).read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]

    def config(self, name: str) -> Path:
        """What is played."""
        return self.folder(name) / "config.yaml"

    def results(self, name: str) -> Path:
        """What was measured."""
        return self.folder(name) / "results.jsonl"

    def _module(self, name: str, part: str) -> ModuleType:
        self.folder(name)
        return importlib.import_module(f"{self.package}.{name}.{part}")
