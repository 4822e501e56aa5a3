"""Direction of imports: the core imports nothing else, no cycles, one place each for Ray and vLLM.

A component is a top-level package or module of `serve_app`. Imports are read from the source, so those inside
functions count as well; those under `if TYPE_CHECKING` do not exist at run time.
"""

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from serve_app.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1] / "serve_app"

# Top-level packages and modules of `serve_app`, and what each may import besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "request": set(),
    "errors": {"request"},
    "core": {"request", "errors"},
    # The engines, and the engine model that simulation and the emulated engine share.
    "engines": {"request", "errors", "core"},
    # The simulator and the live application drive the same core. Neither imports the other.
    "lab": {"request", "errors", "core", "engines"},
    "tuning": {"request", "errors", "core", "engines", "lab"},
    "serving": {"request", "errors", "core", "engines", "tuning"},
    "settings": {"request", "errors", "core", "engines", "tuning", "serving"},
    "app": {"errors", "engines", "serving", "settings"},
    "cli": {"request", "errors", "core", "engines", "lab", "tuning", "serving", "settings"},
    "__main__": {"cli"},
}

# Pure modules only compute: time, randomness and everything else are arguments.
PURE = (
    "core",
    *(f"engines/model/{name}.py" for name in ("model", "step_time", "__init__")),
    "request.py",
    "errors.py",
)
IMPURE_STANDARD_LIBRARY = {
    *("asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select"),
    *("signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid"),
}

# Libraries that only compute, and the only pure modules that need them. Events are messages of the control
# channel as well, commands are parts of messages, and learned state is stored as JSON.
PURE_LIBRARIES = {
    "msgspec": (
        "core/commands.py",
        "core/decision_log.py",
        "core/events.py",
        "core/learned_state.py",
        "core/metrics/record.py",
        "core/routing/estimation/estimate.py",
        "core/routing/estimation/output_length.py",
        "core/routing/prefill_cost.py",
        "core/routing/snapshot.py",
        "request.py",
    ),
    "numpy": ("core/routing/estimation/byte_classes.py", "core/routing/estimation/estimate.py"),
}

# Places where the heavy libraries may be imported.
HOMES = {
    "ray": ("serving", "app.py", "cli/serve/changes.py", "cli/serve/cluster.py"),
    "vllm": ("engines/vllm/library.py", "engines/vllm/timed.py"),
    "sklearn": ("tuning",),
    "scipy": ("lab/calibration.py",),
    "hyperopt": ("tuning",),
    "opentelemetry": ("serving/gateway/tracing",),
    "matplotlib": (),
}


@dataclass(frozen=True)
class Import:
    """One import: file (path under `serve_app`), target, and place."""

    file: str
    module: str
    line: int

    def __str__(self) -> str:
        return f"serve_app/{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    return imports_in(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())


def imports_in(source: str, file: str) -> Iterator[Import]:
    for node in running_nodes(ast.parse(source)):
        for module in modules_named(node, file):
            yield Import(file, module, getattr(node, "lineno", 0))


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that is executed at run time."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from running_nodes(child)


def modules_named(node: ast.AST, file: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"serve_app/{file}:{node.lineno}: write imports with their full path"
        # `from serve_app import x` names the component x, if there is one of that name.
        if node.module == "serve_app":
            return [f"serve_app.{alias.name}" for alias in node.names if alias.name in MAY_IMPORT]
        return [node.module or ""]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"import_module", "importlib.import_module"}:
        return [str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)]
    return []


def is_within(file: str, places: tuple[str, ...]) -> bool:
    return any(file == place or file.startswith(f"{place}/") for place in places)


def named_in_the_table_of_commands() -> Iterator[Import]:
    """Yield the modules that the command line imports by the name in its table."""
    for entry in COMMANDS:
        yield Import("cli/__init__.py", entry.module, 0)


def component_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


@functools.cache
def all_imports() -> list[Import]:
    found = [one for path in sorted(ROOT.rglob("*.py")) for one in imports_of(path)]
    return [*found, *named_in_the_table_of_commands()]


def test_the_reader_finds_imports_wherever_they_hide() -> None:
    source = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import for_types_only
def f():
    from c import d
    importlib.import_module("e.f")
from serve_app import errors, __version__
"""
    found = [one.module for one in imports_in(source, "x.py")]
    assert found == ["a.b", "typing", "c", "e.f", "serve_app.errors"]


def test_every_component_has_its_line_in_the_table() -> None:
    found = {component_of(path.relative_to(ROOT).as_posix()) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert found <= set(MAY_IMPORT)


def test_components_import_only_what_the_table_allows() -> None:
    wrong = []
    for one in all_imports():
        package, _, rest = one.module.partition(".")
        target, component = rest.partition(".")[0], component_of(one.file)
        if package == "serve_app" and target and target != component and target not in MAY_IMPORT[component]:
            wrong.append(str(one))
    assert wrong == []


def test_the_table_has_no_cycles() -> None:
    finished: set[str] = set()
    while len(finished) < len(MAY_IMPORT):
        ready = {name for name, allowed in MAY_IMPORT.items() if name not in finished and allowed <= finished}
        assert ready, f"these import each other: {set(MAY_IMPORT) - finished}"
        finished |= ready


@pytest.mark.parametrize("place", PURE)
def test_the_pure_core_needs_nothing_but_pure_modules(place: str) -> None:
    wrong = []
    for one in all_imports():
        top = one.module.partition(".")[0]
        is_ours = top == "serve_app"
        is_pure = top in sys.stdlib_module_names and top not in IMPURE_STANDARD_LIBRARY
        is_pure = is_pure or one.file in PURE_LIBRARIES.get(top, ())
        if is_within(one.file, (place,)) and not is_ours and not is_pure:
            wrong.append(str(one))
    assert wrong == []


def test_the_pure_core_imports_only_itself_of_the_package() -> None:
    wrong = []
    for one in all_imports():
        if is_within(one.file, PURE) and one.module.startswith("serve_app"):
            target = one.module.removeprefix("serve_app.").replace(".", "/")
            if not is_within(target, PURE) and not is_within(f"{target}.py", PURE):
                wrong.append(str(one))
    assert wrong == []


@pytest.mark.parametrize("library", HOMES)
def test_heavy_libraries_are_imported_in_their_home_alone(library: str) -> None:
    wrong = [
        str(one)
        for one in all_imports()
        if one.module.partition(".")[0] == library and not is_within(one.file, HOMES[library])
    ]
    assert wrong == []
