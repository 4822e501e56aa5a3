"""Queries shared by the dashboards."""

GATEWAY = "ewsjf_gateway_"


def quantile(share: float, histogram: str, by: str = "", extra: str = "") -> str:
    """Return a quantile of a histogram over the interval, by some labels."""
    labels = f"le, {by}" if by else "le"
    selected = f'{histogram}_bucket{{model=~"$model"{extra}}}'
    return f"histogram_quantile({share:g}, sum by ({labels}) (rate({selected}[$interval])))"


def rate(counter: str, by: str, extra: str = "") -> str:
    """Return the rate of a counter, by some labels."""
    selected = f'{counter}{{model=~"$model"{extra}}}'
    return f"sum by ({by}) (rate({selected}[$interval]))"


def mean(histogram: str, by: str) -> str:
    """Return the mean of a histogram's observations, by some labels."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def gauge(name: str, by: str, how: str = "max") -> str:
    """Return a gauge, by some labels."""
    return f'{how} by ({by}) ({name}{{model=~"$model"}})'


def attainment(by: str) -> str:
    """Return the SLO attainment: share of requests that met the latency targets of their class."""
    attained = rate(f"{GATEWAY}slo_attained_requests_total", by)
    return f"{attained} / {rate(f'{GATEWAY}slo_requests_total', by)}"
