"""Headers of other gateways as synonyms of the gateway's own, which win if both are sent.

| synonym                                                              | own header          |
|----------------------------------------------------------------------|---------------------|
| `x-llm-d-inference-fairness-id`, `x-gateway-inference-fairness-id`    | `x-tenant`          |
| `x-llm-d-inference-objective`, `x-gateway-inference-objective`        | `x-priority`        |
| `x-llm-d-inference-ttl`, a duration such as `1500ms` or `1m30s`       | `x-queue-timeout-s` |
| `x-llm-d-slo-ttft-ms`                                                | `x-slo-ttft-ms`     |
| `x-llm-d-slo-tpot-ms`                                                | `x-slo-tpot-ms`     |

The `x-llm-d` names are those of llm-d's router (pkg/epp/metadata/consts.go), the others those of the Gateway
API Inference Extension. Clients may send them for another gateway, so an invalid or forbidden value is
ignored and never an error.
"""

import re
from collections.abc import Callable, Mapping

from serve_app.request import PriorityClass
from serve_app.serving.api_keys import is_tenant_name
from serve_app.serving.gateway.answer.responses import header_text
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.headers import MAX_QUEUE_TIMEOUT_S, milliseconds

_UNIT_S = {b"ns": 1e-9, b"us": 1e-6, "µs".encode(): 1e-6, b"ms": 1e-3, b"s": 1.0, b"m": 60.0, b"h": 3600.0}
# Go's `time.ParseDuration`, without signs.
_PART = re.compile(rb"(\d+\.?\d*|\.\d+)(ns|us|\xc2\xb5s|ms|s|m|h)")

_Translate = Callable[[bytes, Caller], bytes | None]


def _tenant(value: bytes, caller: Caller) -> bytes | None:
    return value if caller.may_act_for_tenants and is_tenant_name(header_text(value)) else None


def _priority(value: bytes, caller: Caller) -> bytes | None:
    try:
        named = PriorityClass(header_text(value).strip().lower())
    except ValueError:
        return None
    return value if caller.may_use_class(named) else None


def _timeout_s(value: bytes, _caller: Caller) -> bytes | None:
    parts = _PART.findall(value)
    if not parts or b"".join(number + unit for number, unit in parts) != value:
        return None
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    return b"%r" % seconds if 0 < seconds <= MAX_QUEUE_TIMEOUT_S else None


def _target(value: bytes, _caller: Caller) -> bytes | None:
    return None if milliseconds(value) is None else value


_SYNONYMS: Mapping[bytes, tuple[bytes, _Translate]] = {
    b"x-llm-d-inference-fairness-id": (b"x-tenant", _tenant),
    b"x-gateway-inference-fairness-id": (b"x-tenant", _tenant),
    b"x-llm-d-inference-objective": (b"x-priority", _priority),
    b"x-gateway-inference-objective": (b"x-priority", _priority),
    b"x-llm-d-inference-ttl": (b"x-queue-timeout-s", _timeout_s),
    b"x-llm-d-slo-ttft-ms": (b"x-slo-ttft-ms", _target),
    b"x-llm-d-slo-tpot-ms": (b"x-slo-tpot-ms", _target),
}
_NAMES = frozenset(_SYNONYMS)


def with_own_names(
    headers: Mapping[bytes, bytes], caller: Caller, on_ignored: Callable[[bytes], None]
) -> Mapping[bytes, bytes]:
    """Return the headers of a request, with the gateway's own in place of synonyms.

    Args:
        on_ignored: called with the name of each synonym whose value is invalid or not allowed for the caller.
    """
    if _NAMES.isdisjoint(headers):
        return headers
    found = dict(headers)
    for name, (own, translate) in _SYNONYMS.items():
        if name not in headers:
            continue
        value = translate(found.pop(name), caller)
        if value is None:
            on_ignored(name)
        else:
            found.setdefault(own, value)
    return found
