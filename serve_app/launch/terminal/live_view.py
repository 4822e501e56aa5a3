"""One line about a running application, from its metrics."""

import time
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0
_CONCLUDED = "ewsjf_requests_concluded_total"


class LiveView:
    """Reads `/metrics` and tells what changed since the last time.

    Args:
        url: of the application.
        api_key: that of an admin, where the application asks for keys.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # The address is that of our own configuration.
        self._request = urllib.request.Request(f"{url}/metrics", headers=headers)  # noqa: S310
        self._before: tuple[float, float] | None = None

    def line(self) -> str:
        """Such as `3 running, 1 waiting, 2.5 requests/s`; says so when the application does not answer."""
        try:
            with urllib.request.urlopen(self._request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - as above
                text = answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as exc:
            return "its metrics need the key of an admin" if exc.code in (401, 403) else f"answers {exc.code}"
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
