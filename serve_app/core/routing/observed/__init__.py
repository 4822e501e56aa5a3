"""Limits, pace and liveness of engines that do not report them, observed from their requests.

`limits` learns the queue, the batch size and the KV cache of an engine that reports neither its queue nor its
batch size. `learned_batch` and `learned_context` learn single limits, `measured_pace` the time per output
token. `hang_detector` detects engines that hang.
"""
