"""Who uses the application, and who waits."""

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
    text="Who uses the application, and who waits. After 1,000 names, further tenants are `other`.",
    variables=(Variable("tenant", "ewsjf_tenant_requests_total", "tenant"),),
    sections=(
        (
            "Use",
            (
                line(
                    "Tokens per second",
                    "As the engines counted them, the ten tenants with most.",
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
                    "That ended in an engine.",
                    "reqps",
                    (f"topk(10, {rate('ewsjf_tenant_requests_total', 'tenant', _CHOSEN)})", "{{tenant}}"),
                ),
                line(
                    "Engine time",
                    "Replicas that work for a tenant all the time, the ten tenants with most.",
                    "short",
                    (
                        f"topk(10, {rate('ewsjf_tenant_engine_seconds_total', 'tenant', _CHOSEN)})",
                        "{{tenant}}",
                    ),
                    stacked=True,
                ),
                line(
                    "Tokens by API key",
                    "For charging; the ledger behind /debug/usage has days.",
                    "short",
                    (rate("ewsjf_key_tokens_total", "key, kind"), "{{key}} {{kind}}"),
                ),
                line(
                    "Requests by API key",
                    "That ended in an engine.",
                    "reqps",
                    (rate("ewsjf_key_requests_total", "key"), "{{key}}"),
                ),
            ),
        ),
        (
            "Fairness",
            (
                line(
                    "Requests waiting",
                    "One tenant alone waits for itself; all together wait for capacity.",
                    "short",
                    (_of_chosen("ewsjf_tenant_requests_waiting", "tenant"), "{{tenant}}"),
                    stacked=True,
                ),
                line(
                    "Delay of others",
                    "Requests kept waiting, on average, while a tenant took places that they could have had.",
                    "short",
                    (
                        f"topk(10, {rate('ewsjf_tenant_imposed_delay_seconds_total', 'tenant', _CHOSEN)})",
                        "{{tenant}}",
                    ),
                ),
                line(
                    "Lead in service",
                    "How far a tenant is ahead of the one with least, weights taken into account.",
                    "percentunit",
                    (_of_chosen("ewsjf_tenant_lead_ratio", "class, tenant"), "{{class}} {{tenant}}"),
                    at_most=1,
                ),
            ),
        ),
    ),
)
