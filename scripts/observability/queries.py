"""Queries that several dashboards share."""

GATEWAY = "ewsjf_gateway_"


def quantile(share: float, histogram: str, by: str = "", extra: str = "") -> str:
    """A quantile of a histogram over the interval, by some labels."""
    labels = f"le, {by}" if by else "le"
    selected = f'{histogram}_bucket{{model=~"$model"{extra}}}'
    return f"histogram_quantile({share:g}, sum by ({labels}) (rate({selected}[$interval])))"


def rate(counter: str, by: str, extra: str = "") -> str:
    """The rate of a counter, by some labels."""
    selected = f'{counter}{{model=~"$model"{extra}}}'
    return f"sum by ({by}) (rate({selected}[$interval]))"


def mean(histogram: str, by: str) -> str:
    """The mean of what a histogram observed, by some labels."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def gauge(name: str, by: str, how: str = "max") -> str:
    """A gauge, by some labels."""
    return f'{how} by ({by}) ({name}{{model=~"$model"}})'


def attainment(by: str) -> str:
    """The share of requests within the targets of their class."""
    good, judged = rate(f"{GATEWAY}good_requests_total", by), rate(f"{GATEWAY}judged_requests_total", by)
    return f"{good} / {judged}"
