"""Values as YAML writes them inside a line."""

import yaml


def scalar(text: str) -> str:
    """A text, quoted only where YAML needs it."""
    return yaml.safe_dump(text, width=10_000).removesuffix("\n...\n").removesuffix("\n")


def flow(texts: tuple[str, ...]) -> str:
    """A list within one line."""
    return yaml.safe_dump(list(texts), default_flow_style=True, width=10_000).strip()
