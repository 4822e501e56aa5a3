"""What a running application tells of itself, read once."""

import email.utils
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from serve_app.errors import ServeAppError

Document = Mapping[str, Any]

_TIMEOUT_S = 10.0


class SilentError(ServeAppError):
    """Nothing answers at the address."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer of any status."""

    status: int
    headers: Mapping[str, str]
    body: str

    def document(self) -> Document | None:
        """The JSON object that it holds."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was read.

    Attributes:
        status: one document per model, from `/debug/status`; empty when it may not be read.
        queues: the same from `/debug/queue`.
        samples: of `/metrics`.
        clock_skew_s: how far its clock is ahead of ours; None when it tells no time.
        refusal: why the views could not be read.
    """

    health: HttpAnswer
    ready: HttpAnswer
    status: tuple[Document, ...] = ()
    queues: tuple[Document, ...] = ()
    samples: tuple[Sample, ...] = ()
    clock_skew_s: float | None = None
    refusal: HttpAnswer | None = None

    def total(self, name: str, model: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and {"model": model, **labels}.items() <= sample.labels.items()
        )


def inspect(url: str, api_key: str | None) -> Inspection:
    """Ask for everything once.

    Raises:
        SilentError: nothing answers.
    """
    health = _get(url, "/health", None)
    ready = _get(url, "/ready", None)
    status, queue = (_get(url, path, api_key) for path in ("/debug/status", "/debug/queue"))
    refused = next((answer for answer in (status, queue) if answer.status != 200), None)
    return Inspection(
        health=health,
        ready=ready,
        status=_models(status),
        queues=_models(queue),
        samples=_samples(_get(url, "/metrics", api_key)),
        clock_skew_s=_skew_s(health),
        refusal=refused,
    )


def _get(url: str, path: str, api_key: str | None) -> HttpAnswer:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # The caller has checked that the URL is HTTP.
    request = urllib.request.Request(url + path, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
            return HttpAnswer(
                response.status, dict(response.headers), response.read().decode("utf-8", "replace")
            )
    except urllib.error.HTTPError as error:
        with error:
            return HttpAnswer(error.code, dict(error.headers), error.read().decode("utf-8", "replace"))
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise SilentError(str(reason)) from error
    except ValueError as error:
        raise SilentError(str(error)) from error


def _models(answer: HttpAnswer) -> tuple[Document, ...]:
    document = answer.document() if answer.status == 200 else None
    models = (document or {}).get("models")
    return tuple(models) if isinstance(models, list) else ()


def _samples(answer: HttpAnswer) -> tuple[Sample, ...]:
    if answer.status != 200:
        return ()
    try:
        families = list(text_string_to_metric_families(answer.body))
    except ValueError:
        return ()
    return tuple(sample for family in families for sample in family.samples)


def _skew_s(answer: HttpAnswer) -> float | None:
    told = next((value for name, value in answer.headers.items() if name.lower() == "date"), None)
    try:
        return None if told is None else email.utils.parsedate_to_datetime(told).timestamp() - time.time()
    except ValueError:
        return None
