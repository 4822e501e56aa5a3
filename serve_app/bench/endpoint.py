"""Models and preemptions of an endpoint, read before and after a run."""

import json
import re
import urllib.error

from serve_app.bench.connection import BenchError, Target
from serve_app.command import fetched

_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def served_models(target: Target, api_key: str | None) -> list[str]:
    """The model names in `/v1/models`.

    Raises:
        BenchError: the endpoint cannot be reached, or does not answer like an OpenAI API.
    """
    url = f"{target.base_url}/v1/models"
    try:
        document = json.loads(fetched(url, api_key))
        return [str(model["id"]) for model in document["data"]]
    except urllib.error.HTTPError as exc:
        raise BenchError(f"{url} answers {exc.code}: give --api-key if it asks for one") from exc
    except OSError as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        raise BenchError(f"cannot reach {url}: {reason}; is the server running?") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise BenchError(f"{url} does not list models as the OpenAI API does: {exc!r}") from exc


def preemptions_so_far(target: Target, api_key: str | None) -> int | None:
    """Preemptions of all engines, from the endpoint's `/metrics`; None when it does not export them."""
    try:
        text = fetched(f"{target.base_url}/metrics", api_key).decode("utf-8", "replace")
        counts = [float(count) for count in _PREEMPTIONS.findall(text)]
    except (OSError, ValueError):
        return None
    return round(sum(counts)) if counts else None
