"""Times to first token in a few figures, for people and programs: all requests, and the short ones."""

from collections.abc import Iterable
from typing import Any

from serve_app.metrics.summary import SHORT_AT_TOKENS


def first_token_figures(firsts: Iterable[tuple[int, float]]) -> dict[str, dict[str, Any]]:
    """Number, median and 99th percentile, of all and of the short ones.

    Args:
        firsts: tokens of each prompt, and seconds from its arrival to the first token.
    """
    known = list(firsts)
    short = [ttft_s for tokens, ttft_s in known if tokens <= SHORT_AT_TOKENS]
    return {"all": _figures([ttft_s for _, ttft_s in known]), "short": _figures(short)}


def _figures(values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)
    found: dict[str, Any] = {"requests": len(ordered)}
    for name, share in (("ttft_p50_s", 0.5), ("ttft_p99_s", 0.99)):
        found[name] = round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None
    return found
