"""Dashboard of tenants: usage and fairness."""

from observability.panels import Dashboard, Variable, line
from observability.queries import gauge, rate

_CHOSEN = ',tenant=~"$tenant"'


def _of_chosen(name: str, by: str) -> str:
    return gauge(name, by).replace('"$model"', f'"$model"{_CHOSEN}')


_OF_EACH = rate("ewsjf_tenant_tokens_total", "tenant", _CHOSEN)
_OF_ALL = 'sum(rate(ewsjf_tenant_tokens_total{model=~"$model"}[$interval]))'

TENANTS = Dashboard(
    name="tenants",
    title="tenants",
    text="Usage and queue by tenant. After 1,000 names, further tenants are `other`.",
    variables=(Variable("tenant", "ewsjf_tenant_requests_total", "tenant"),),
    sections=(
        (
            "Usage",
            (
                line(
                    "Tokens per second",
                    "As counted by the engines; the ten largest tenants.",
                    "short",
                    (f"topk(10, {rate('ewsjf_tenant_tokens_total', 'tenant', _CHOSEN)})", "{{tenant}}"),
                    stacked=True,
                ),
                line(
                    "Share of tokens",
                    "Of all tokens.",
                    "percentunit",
                    (
                        f"{_OF_EACH} / on () group_left () {_OF_ALL}",
                        "{{tenant}}",
                    ),
                    at_most=1,
                ),
                line(
                    "Requests per second",
                    "Requests that ended in an engine; the ten largest tenants.",
                    "reqps",
                    (f"topk(10, {rate('ewsjf_tenant_requests_total', 'tenant', _CHOSEN)})", "{{tenant}}"),
                ),
                line(
                    "Engine time",
                    "In replicas (engine seconds per second); the ten largest tenants.",
                    "short",
                    (
                        f"topk(10, {rate('ewsjf_tenant_engine_seconds_total', 'tenant', _CHOSEN)})",
                        "{{tenant}}",
                    ),
                    stacked=True,
                ),
                line(
                    "Tokens by API key",
                    "For charging; GET /debug/usage has days.",
                    "short",
                    (rate("ewsjf_key_tokens_total", "key, kind"), "{{key}} {{kind}}"),
                ),
                line(
                    "Requests by API key",
                    "Requests that ended in an engine.",
                    "reqps",
                    (rate("ewsjf_key_requests_total", "key"), "{{key}}"),
                ),
            ),
        ),
        (
            "Fairness",
            (
                line(
                    "Queued requests",
                    "Only one tenant: it exceeds its share. All tenants: capacity is too small.",
                    "short",
                    (_of_chosen("ewsjf_tenant_requests_waiting", "tenant"), "{{tenant}}"),
                    stacked=True,
                ),
                line(
                    "Imposed delay",
                    "Mean number of other tenants' requests that a tenant's requests delay.",
                    "short",
                    (
                        f"topk(10, {rate('ewsjf_tenant_imposed_delay_seconds_total', 'tenant', _CHOSEN)})",
                        "{{tenant}}",
                    ),
                ),
                line(
                    "Lead in service",
                    "Weighted lead over the tenant with the least service, as a share of all leads.",
                    "percentunit",
                    (_of_chosen("ewsjf_tenant_lead_ratio", "class, tenant"), "{{class}} {{tenant}}"),
                    at_most=1,
                ),
            ),
        ),
    ),
)
