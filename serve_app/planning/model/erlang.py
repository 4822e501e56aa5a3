"""Waiting times for one of c servers: Erlang's formulas, with a correction for general service times.

B(c, a)     probability of blocking without a queue, by the recursion B(k) = a B(k-1) / (k + a B(k-1)), which
            divides only numbers of similar size, so it is stable for thousands of servers
C(c, a)     probability of waiting, M/M/c:  B / (1 - u (1 - B)),  u = a / c
P(W > t)    = C * exp(-(c - a) t / E[S]), M/M/c, first come first served
M/G/c       waits of M/M/c times (1 + cv^2) / 2, with cv the coefficient of variation of service times. Kimura
            studied the accuracy of this two-moment approximation (Queueing Systems 15, 1994); it is exact for
            M/M/c and for the mean of M/G/1. Here it scales the whole conditional distribution.
"""

import math


def erlang_b(servers: int, offered: float) -> float:
    """Probability that all servers are busy in a system without a queue.

    Args:
        servers: c, at least 1.
        offered: load in Erlangs, `rate * E[S]`.

    Raises:
        ValueError: there are no servers, or the load is negative.
    """
    if servers < 1 or offered < 0:
        raise ValueError(f"need at least 1 server and a load of at least 0, got {servers} and {offered}")
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked


def erlang_c(servers: int, offered: float) -> float:
    """Probability of having to wait, M/M/c; 1 when the servers cannot keep up."""
    blocked = erlang_b(servers, offered)
    utilisation = offered / servers
    if utilisation >= 1:
        return 1.0
    return blocked / (1 - utilisation * (1 - blocked))


def wait_quantile_s(
    *, servers: int, rate_per_s: float, mean_service_s: float, service_cv2: float, quantile: float = 0.99
) -> float:
    """The wait that a share `quantile` of requests does not exceed, M/G/c.

    Args:
        service_cv2: squared coefficient of variation of service times.
        quantile: 0.99 for the P99.

    Returns:
        Seconds; infinite when the servers cannot keep up.
    """
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must be above 0 and below 1, got {quantile}")
    offered = rate_per_s * mean_service_s
    if offered >= servers:
        return math.inf
    waits = erlang_c(servers, offered)
    if waits <= 1 - quantile:
        return 0.0
    drained_per_s = (servers - offered) / mean_service_s
    return (1 + service_cv2) / 2 * math.log(waits / (1 - quantile)) / drained_per_s
