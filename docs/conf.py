"""How Sphinx builds the site from the Markdown of this repository; scripts/docs build calls it.

The pages are plain Markdown, to be read on a repository's page as well. So the table of contents stands here,
and is added to the front page when it is read. The root of the sources is the repository: pages outside docs/
belong to the site, and links from page to page are the same in both places.
"""

import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

CONTENTS = {
    "Use it": (
        "get-started",
        "put-in-front",
        "coming-from",
        "clients",
        "configure",
        "routes",
        "agents",
        "batches",
        "tuning",
        "benchmarking",
        "planning",
    ),
    "Operate it": (
        "operations",
        "network",
        "security",
        "kubernetes",
        "monitoring",
        "alerts",
        "troubleshooting",
        "explain",
        "logs",
        "tracing",
        "failures",
        "upgrading",
    ),
    "Understand it": (
        "architecture",
        "scheduling",
        "routing",
        "queueing",
        "backpressure",
        "claims",
        "glossary",
    ),
    "Results": (
        "results",
        "results-real-vllm",
        "results-scheduling",
        "results-fairness",
        "results-batch",
        "results-capacity",
        "results-tuning",
        "results-overhead",
        "results-reliability",
    ),
    "Reference": (
        "reference/configuration",
        "reference/configuration-models",
        "reference/configuration-scheduler",
        "reference/configuration-tuner",
        "reference/cli",
        "reference/metrics",
        "reference/chart",
        "reference/endpoints",
        "reference/outcomes",
        "reference/messages",
        "servers",
        "emulated",
    ),
    "Contribute": ("/CONTRIBUTING", "code-index", "writing", "/CHANGELOG"),
    "Experiments": ("/experiments/README", "/experiments/*/README"),
}
"""Captions, and the pages below each: of docs/, or with a slash of the repository."""

project = "ewsjf-serve"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "experiments/README.md",
    "experiments/*/README.md",
]
exclude_patterns = [".*", "build", "models", "out", "scripts", "serve_app", "tests"]

# Headings down to this level can be linked to, as on a repository's page.
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"{project} {release}"
# Holds the page that leads from the site's root to docs/.
html_extra_path = ["_site"]
html_copy_source = False


def _contents() -> str:
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n" + "\n".join(names) + "\n```\n"
        for caption, names in CONTENTS.items()
    )


def _add_contents(_: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += _contents()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_contents)
