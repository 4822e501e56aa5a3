"""The papers' rows, computed again with their own engine model: slots reserved for the longest context."""

from typing import Any

import numpy as np

from experiments.planning.settings import PublishedRow
from serve_app.planning.model.closed_form import saving, work_share
from serve_app.planning.model.length_mix import LengthMix
from serve_app.planning.model.paper_model import A100
from serve_app.simulation.workload import TraceChoice, choose_trace

# Requests per second of one instance of 2604.08075: of the short pool, and of one undivided or long.
PRINTED_SHORT_RATE, PRINTED_WHOLE_RATE = 11.2, 2.8


def recomputed(row: PublishedRow, requests: int) -> dict[str, Any]:
    """GPUs of one pool and of two by the papers' model, its closed forms, and what the printed ones need.

    `alpha_implied` is the share of short requests that the printed closed form needs with the rates for each
    instance that the paper states.
    """
    mix = LengthMix.of(choose_trace(TraceChoice(name=row.trace, requests=requests), 0))
    short, long = mix.split(row.b_short_tokens)
    alpha = len(short) / len(mix)
    whole = A100.pool(mix, row.context_tokens)
    undivided = whole.instances(row.rate_per_s, row.ttft_s)
    short_pool = A100.pool(short, row.b_short_tokens)
    divided = short_pool.instances(alpha * row.rate_per_s, row.ttft_s)
    if len(long):
        divided += A100.pool(long, row.context_tokens).instances((1 - alpha) * row.rate_per_s, row.ttft_s)
    # The pace of short requests alone, on instances of either kind.
    rho = short_pool.throughput_per_s / A100.pool(short, row.context_tokens).throughput_per_s
    iterations = [
        float(np.mean(np.ceil(one.prompts / A100.chunk_tokens) + one.outputs)) for one in (short, mix)
    ]
    w_s = work_share(alpha, *iterations)
    implied = None
    if row.closed_form is not None:
        implied = row.closed_form / (1 - PRINTED_WHOLE_RATE / PRINTED_SHORT_RATE)
    return {
        "one_pool_gpus": undivided * A100.gpus,
        "two_pools_gpus": divided * A100.gpus,
        "saving": 1 - divided / undivided,
        "alpha": alpha,
        "w_s": w_s,
        "rho": rho,
        "by_requests": saving(alpha, rho),
        "by_work": saving(w_s, rho),
        "alpha_implied": implied,
    }
