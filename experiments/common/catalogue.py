"""Catalogue of a package's experiments and their files."""

import ast
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.common.experiment import Experiment
from experiments.common.picture import Picture
from experiments.common.rows import Row, read_rows
from experiments.common.tables import Table
from serve_app.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Experiments: the sub-packages with a `run.py`.

    Attributes:
        package: importable package that contains them.
    """

    package: str = "experiments"

    @property
    def root(self) -> Path:
        """Return the package's folder."""
        return Path(str(importlib.import_module(self.package).__file__)).parent

    def names(self) -> list[str]:
        """Return all experiments, sorted by name."""
        return sorted(path.parent.name for path in self.root.glob(f"*/{Experiment.FILE}"))

    def folder(self, name: str) -> Path:
        """Return the folder of an experiment.

        Raises:
            SettingsError: there is no such experiment.
        """
        if name not in self.names():
            raise SettingsError(f"no experiment {name!r}: there are {', '.join(self.names())}")
        return self.root / name

    def experiment(self, name: str) -> Experiment[Any]:
        """Return the experiment that `run.py` defines."""
        found: Experiment[Any] = self._module(name, "run").EXPERIMENT
        return found

    def tables(self, name: str) -> Mapping[str, Table]:
        """Return the tables that `tables.py` defines."""
        found: Mapping[str, Table] = self._module(name, "tables").TABLES
        return found

    def pictures(self, name: str) -> Mapping[str, Picture]:
        """Return the pictures that `tables.py` may define, by path in the checkout."""
        found: Mapping[str, Picture] = getattr(self._module(name, "tables"), "PICTURES", {})
        return found

    def question(self, name: str) -> str:
        """Return the first docstring line of `run.py`; it is parsed, since importing all takes seconds."""
        source = (self.folder(name) / Experiment.FILE).read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]

    def config(self, name: str) -> Path:
        """Return the file of settings."""
        return self.folder(name) / "config.yaml"

    def results(self, name: str) -> Path:
        """Return the file of results."""
        return self.folder(name) / "results.jsonl"

    def rows(self, name: str) -> list[Row]:
        """Return the rows of the file of results; none before the first run."""
        return read_rows(self.results(name))

    def _module(self, name: str, part: str) -> ModuleType:
        self.folder(name)
        return importlib.import_module(f"{self.package}.{name}.{part}")
