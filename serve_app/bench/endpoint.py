"""What a benchmark asks of an endpoint before and after a run: its models, and its engines' preemptions."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping

from serve_app.bench.connection import BenchError, Target

_TIMEOUT_S = 10.0
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def served_models(target: Target, api_key: str | None) -> list[str]:
    """The names under `/v1/models`.

    Raises:
        BenchError: the endpoint cannot be reached, or does not answer like an OpenAI API.
    """
    url = f"{target.base_url}/v1/models"
    try:
        document = json.loads(_get(url, _authorisation(api_key)))
        return [str(model["id"]) for model in document["data"]]
    except urllib.error.HTTPError as exc:
        raise BenchError(f"{url} answers {exc.code}: give --api-key if it asks for one") from exc
    except OSError as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        raise BenchError(f"cannot reach {url}: {reason}; is the server running?") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise BenchError(f"{url} does not list models as the OpenAI API does: {exc!r}") from exc


def preemptions_so_far(target: Target) -> int | None:
    """Preemptions of all engines behind the endpoint, by its `/metrics`; None when it does not say."""
    try:
        text = _get(f"{target.base_url}/metrics", {}).decode("utf-8", "replace")
        counts = [float(count) for count in _PREEMPTIONS.findall(text)]
    except (OSError, ValueError):
        return None
    return round(sum(counts)) if counts else None


def _authorisation(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _get(url: str, headers: Mapping[str, str]) -> bytes:
    # `Target` lets only http and https through.
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 - see above
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 - see above
        body: bytes = response.read()
    return body
