"""Limits, pace and liveness of engines that do not report them, observed from their requests.

`limits` learns the limit of an engine that reports neither its queue nor its batch size, and `interference`
whether its long prefills delay other requests; both compare by `ranks`. `learned_batch` and `learned_context`
learn limits of other engines, and `measured_pace` the time per output token. `hang_detector` detects engines
that hang.
"""
