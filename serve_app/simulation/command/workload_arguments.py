"""The arguments for the workload and the number of replicas, which several commands share."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app.command import positive_float, positive_int
from serve_app.metrics.summary import SHORT_AT_TOKENS
from serve_app.routing.pools import RoutingSettings
from serve_app.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings, PoolChanges
from serve_app.simulation.workload import TraceChoice

_UNCHANGED = EngineChanges()
_ARRIVALS = "poisson, gamma:CV or on-off:ON,OFF in requests (the trace's own)"


def configure_workload(
    group: "argparse._ArgumentGroup", *, requests_help: str, requests: int | None = None
) -> None:
    """Add the arguments that `trace_choice` reads, and the rate or the load.

    Args:
        requests: default of their number.
    """
    configure_trace(group)
    rate = group.add_mutually_exclusive_group()
    rate.add_argument("--load", type=positive_float, help="share of the rate that saturates the fleet: 0.9")
    rate.add_argument("--rate", type=positive_float, help="requests per second (the trace's own)")
    group.add_argument("--requests", type=positive_int, default=requests, help=requests_help)
    group.add_argument("--tenants", help="8, 8:1.2 (Zipf exponent) or search=3,chat=1 (weights)")
    group.add_argument("--priorities", help="shares of priority classes: interactive=1,batch=3")


def configure_trace(
    group: "argparse._ArgumentGroup", *, arrivals: str | None = None, arrivals_help: str = _ARRIVALS
) -> None:
    """Add `--trace`, its folder, and its arrival pattern.

    Args:
        arrivals: default of the pattern; None keeps the trace's own.
    """
    group.add_argument(
        "--trace",
        required=True,
        help="azure-code, azure-conv, lmsys, paper-mix, or a trace file; several joined by + are merged",
    )
    group.add_argument("--arrivals", default=arrivals, help=arrivals_help)
    group.add_argument("--traces-folder", type=Path, help="where trace files lie (EWSJF_TRACES)")


def configure_slo(group: "argparse._ArgumentGroup") -> None:
    """Add the longest short prompt, and the limits of the SLO for short and long prompts."""
    group.add_argument(
        "--short-at", type=positive_int, default=SHORT_AT_TOKENS, help="longest short prompt (%(default)s)"
    )
    group.add_argument(
        "--slo-ttft-s", type=positive_float, default=1.0, help="of short prompts (%(default)s)"
    )
    group.add_argument("--slo-long-ttft-s", type=positive_float, default=10.0, help="of others (%(default)s)")
    group.add_argument("--slo-tpot-s", type=positive_float, default=0.1, help="(%(default)s)")


def configure_max_output(group: "argparse._ArgumentGroup") -> None:
    """Add whether requests state the length of their answers."""
    group.add_argument(
        "--max-output",
        choices=("default", "known"),
        default="default",
        help="whether requests state their true output length in max_tokens; default: they state none",
    )


def configure_replicas(group: "argparse._ArgumentGroup", *, b_short_help: str) -> None:
    """Add the engines' profile, their number in one pool or several, and the first boundary between them."""
    group.add_argument("--profile", default="llama2-70b-h100-tp4", help="name or YAML file (%(default)s)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--replicas", type=positive_int, default=4, help="in one pool (%(default)s)")
    size.add_argument(
        "--pools",
        type=pools,
        metavar="NAME:N[:CONTEXT[:PROFILE]],...",
        help="replicas of several pools, the shortest context first, such as short:3,long:1 or "
        "short:4:8192,mid:2:32768,long:1",
    )
    group.add_argument("--b-short", type=positive_int, help=b_short_help)


def trace_choice(args: argparse.Namespace, *, flip_mix_at: int | None = None) -> TraceChoice:
    """The trace that `configure_workload` asks for.

    Args:
        flip_mix_at: see `TraceChoice`.
    """
    return TraceChoice(
        name=args.trace,
        requests=args.requests,
        tenants=args.tenants,
        priorities=args.priorities,
        folder=args.traces_folder,
        arrivals=args.arrivals,
        flip_mix_at=flip_mix_at,
    )


@dataclass(frozen=True, slots=True)
class PoolArgument:
    """One pool of `--pools`; what is not given is None."""

    replicas: int
    context_tokens: int | None = None
    profile: str | None = None


def pools(text: str) -> dict[str, PoolArgument]:
    """An argument type: `short:3,long:1`, or `short:4:8192,mid:2:32768,long:1:llama2-70b-h100-tp4`."""
    given: dict[str, PoolArgument] = {}
    for part in text.split(","):
        name, *rest = (field.strip() for field in part.split(":", 3))
        try:
            replicas, context = int(rest[0]), int(rest[1]) if rest[1:] and rest[1] else None
        except (ValueError, IndexError):
            raise argparse.ArgumentTypeError(f"write NAME:N or NAME:N:CONTEXT, got {part!r}") from None
        if replicas < 1 or (context is not None and context < 1):
            raise argparse.ArgumentTypeError(f"a pool has at least one replica and token, got {part!r}")
        if not name or name in given:
            raise argparse.ArgumentTypeError(f"each pool needs a name of its own, got {text!r}")
        given[name] = PoolArgument(replicas, context, rest[2] if rest[2:] else None)
    if given.keys() == {"short", "long"}:
        return {name: given[name] for name in ("short", "long")}
    return given


def fleet_of(args: argparse.Namespace, engine: EngineChanges = _UNCHANGED) -> FleetSettings:
    """The replicas that `configure_replicas` asks for.

    Args:
        engine: changes to every engine.
    """
    given: dict[str, PoolArgument] = args.pools or {ONE_POOL: PoolArgument(args.replicas)}
    by_pool = {
        name: PoolChanges(profile=pool.profile, engine=EngineChanges(max_model_len=pool.context_tokens))
        for name, pool in given.items()
        if pool.profile is not None or pool.context_tokens is not None
    }
    return FleetSettings(
        profile=args.profile,
        replicas={name: pool.replicas for name, pool in given.items()},
        b_short_tokens=args.b_short or _b_short(list(given.values())),
        engine=engine,
        by_pool=by_pool,
    )


def _b_short(given: Sequence[PoolArgument]) -> int:
    """As for a served model (`WrittenRouting.b_short_tokens`)."""
    usual, context = RoutingSettings().b_short_tokens, given[0].context_tokens
    if context is None:
        return usual
    return context if len(given) > len(RoutingSettings().pools) else min(usual, context)
