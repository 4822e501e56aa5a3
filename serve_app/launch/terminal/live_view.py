"""One line about a running application, from its metrics."""

import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0
_CONCLUDED = "ewsjf_requests_concluded_total"


class LiveView:
    """Reads `/metrics` and tells what changed since the last time.

    Args:
        url: of the application.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._before: tuple[float, float] | None = None

    def line(self) -> str:
        """Such as `3 running, 1 waiting, 2.5 requests/s`; says so when the application does not answer."""
        try:
            # The address is that of our own configuration.
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=_TIMEOUT_S) as answer:  # noqa: S310
                text = answer.read().decode("utf-8", "replace")
        except OSError as exc:
            return f"does not answer: {exc}"
        sums = _sums(text, ("ewsjf_requests_in_flight", "ewsjf_requests_waiting", _CONCLUDED))
        now, done = time.monotonic(), sums[_CONCLUDED]
        rate = 0.0
        if self._before is not None and now > self._before[0]:
            rate = max(0.0, done - self._before[1]) / (now - self._before[0])
        self._before = (now, done)
        running, waiting = sums["ewsjf_requests_in_flight"], sums["ewsjf_requests_waiting"]
        return f"{running:.0f} running, {waiting:.0f} waiting, {rate:.1f} requests/s, {done:.0f} so far"


def _sums(text: str, names: tuple[str, ...]) -> dict[str, float]:
    found = dict.fromkeys(names, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found
