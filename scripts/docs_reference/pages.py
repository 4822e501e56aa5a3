"""Generated pages and the modules that render them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from docs_reference.chart import chart_page
from docs_reference.command_line import command_line_page
from docs_reference.configuration import CONFIGURATION_PAGES, configuration_page
from docs_reference.endpoints import endpoints_page
from docs_reference.messages import messages_page
from docs_reference.metrics import metrics_page
from docs_reference.outcomes import outcomes_page

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"

PAGES: Mapping[str, Callable[[], str]] = {
    **{name: partial(configuration_page, name) for name in CONFIGURATION_PAGES},
    "cli.md": command_line_page,
    "endpoints.md": endpoints_page,
    "metrics.md": metrics_page,
    "chart.md": chart_page,
    "outcomes.md": outcomes_page,
    "messages.md": messages_page,
}


def write_pages(folder: Path = REFERENCE) -> None:
    """Write every page, replacing existing ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


def outdated_pages(folder: Path = REFERENCE) -> Iterator[str]:
    """Yield the names of missing or outdated pages."""
    for name, page in PAGES.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != page():
            yield name
