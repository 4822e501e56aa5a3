"""Arguments of the command `simulate`, and those that `plan` shares with it."""

import argparse
import atexit
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter

from serve_app.cli.application import ApplicationClient, add_address
from serve_app.cli.command import (
    add_jobs,
    add_number,
    add_settings,
    add_whole,
    positive_float,
    positive_int,
)
from serve_app.core.metrics.summary import SHORT_AT_TOKENS
from serve_app.core.routing.pools import RoutingSettings
from serve_app.engines.model.model import SchedulingPolicy
from serve_app.engines.model.roofline import EngineProfile, save_profile
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import (
    ONE_POOL,
    Disclosure,
    EngineChanges,
    FleetSettings,
    PoolChanges,
    RunSettings,
    SloByLength,
    policy_names,
)
from serve_app.lab.simulation.simulation import (
    LEARNED,
    PRIOR,
    EngineKind,
    PartitionSource,
    SimulationSettings,
    partition_source,
)
from serve_app.lab.workloads import TraceChoice
from serve_app.tuning.engine_fit import engines_of_json

if TYPE_CHECKING:
    from serve_app.settings.application import PoolSettings

_ENGINE = TypeAdapter(EngineChanges)
_ENGINE_FIELDS = tuple(field.name for field in fields(EngineChanges))
_ARRIVALS = "poisson, gamma:CV or on-off:ON,OFF in requests (default: the trace's arrivals)"


def configure_trace(
    group: "argparse._ArgumentGroup",
    *,
    arrivals: str | None = None,
    arrivals_help: str = _ARRIVALS,
) -> None:
    """Add `--trace`, its folder, and its arrival pattern; None is the trace's own."""
    group.add_argument(
        "--trace",
        required=True,
        help="azure-code, azure-conv, lmsys, paper-mix or a trace file; names joined by + are merged",
    )
    group.add_argument("--arrivals", default=arrivals, help=arrivals_help)
    group.add_argument("--traces-folder", type=Path, help="folder of trace files (default: EWSJF_TRACES)")


def configure_max_output(group: "argparse._ArgumentGroup") -> None:
    """Add whether requests state the length of their outputs."""
    group.add_argument(
        "--max-output",
        choices=("default", "known"),
        default="default",
        help="known: requests state their true output length in max_tokens; default: they state none",
    )


DEFAULT_PROFILE = "llama2-70b-h100-tp4"


def configure_profile(group: "argparse._ArgumentGroup") -> None:
    """Add the engines' profile."""
    group.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        help="engine profile: name or YAML file (default: %(default)s)",
    )


def trace_choice(args: argparse.Namespace) -> TraceChoice:
    """Return the trace that the arguments select."""
    return TraceChoice(
        name=args.trace,
        requests=args.requests,
        tenants=args.tenants,
        priorities=args.priorities,
        folder=args.traces_folder,
        arrivals=args.arrivals,
    )


@dataclass(frozen=True, slots=True)
class PoolArgument:
    """One pool of `--pools`. Omitted values are None."""

    replicas: int
    context_tokens: int | None = None
    profile: str | None = None


def pools(text: str) -> dict[str, PoolArgument]:
    """Parse `short:3,long:1`, or `short:4:8192,mid:2:32768,long:1:llama2-70b-h100-tp4`."""
    given: dict[str, PoolArgument] = {}
    for part in text.split(","):
        name, *rest = (field.strip() for field in part.split(":", 3))
        try:
            replicas, context = int(rest[0]), int(rest[1]) if rest[1:] and rest[1] else None
        except (ValueError, IndexError):
            raise argparse.ArgumentTypeError(f"must be NAME:N or NAME:N:CONTEXT, got {part!r}") from None
        if replicas < 1 or (context is not None and context < 1):
            raise argparse.ArgumentTypeError(
                f"replicas and context of a pool must be at least 1, got {part!r}"
            )
        if not name or name in given:
            raise argparse.ArgumentTypeError(f"each pool needs a unique name, got {text!r}")
        given[name] = PoolArgument(replicas, context, rest[2] if rest[2:] else None)
    if given.keys() == {"short", "long"}:
        return {name: given[name] for name in ("short", "long")}
    return given


def fleet(args: argparse.Namespace) -> FleetSettings:
    """Return the replicas: those of `--config`, of `--pools` or of `--replicas`."""
    engine = EngineChanges(**{name: getattr(args, name) for name in _ENGINE_FIELDS})
    if args.like_running:
        return replace(fleet_of_running(ApplicationClient(args), engine), engine=engine)
    if args.config is not None:
        return replace(fleet_of_file(args.config, args.profile), engine=engine)
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
    """Return the default that a served model has (`RoutingConfig.b_short_tokens`)."""
    usual, context = RoutingSettings().b_short_tokens, given[0].context_tokens
    if context is None:
        return usual
    return context if len(given) > len(RoutingSettings().pools) else min(usual, context)


_DEFAULT_POLICY = "ewsjf"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add all arguments."""
    _configure_workload(parser.add_argument_group("workload"))
    _configure_scheduler(parser.add_argument_group("scheduler"))
    _configure_fleet(parser.add_argument_group("fleet"))
    _configure_results(parser.add_argument_group("results"))
    add_address(parser)


def _configure_workload(group: "argparse._ArgumentGroup") -> None:
    configure_trace(group)
    rate = group.add_mutually_exclusive_group()
    add_number(rate, "--load", "share of the rate that saturates the fleet, such as 0.9")
    add_number(rate, "--rate", "requests per second (default: the trace's rate)")
    group.add_argument(
        "--requests", type=positive_int, help="number of requests (default: 1000, or all of a file)"
    )
    group.add_argument("--tenants", help="tenants: 8, 8:1.2 (Zipf exponent) or search=3,chat=1 (weights)")
    group.add_argument("--priorities", help="shares of priority classes: interactive=1,batch=3")
    add_whole(group, "--seeds", "runs per policy, one per seed", 1)
    group.add_argument("--first-seed", type=int, default=0, help="first seed (default: %(default)s)")


def _configure_scheduler(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--policy",
        default=_DEFAULT_POLICY,
        metavar="NAME[,NAME...]",
        help=f"policies: {', '.join(policy_names())} (default: %(default)s); direct: without a gateway",
    )
    add_settings(group, "scheduler setting")
    group.add_argument(
        "--partition",
        default=LEARNED,
        metavar=f"{LEARNED}|{PRIOR}|FILE",
        help=f"length queues of policies that learn them: {LEARNED} during the run, {PRIOR} (one per "
        "octave), or a YAML list of {min, max, mean, count} (default: %(default)s)",
    )
    configure_max_output(group)
    add_number(group, "--queue-timeout-s", "queue timeout of all requests", math.inf)
    add_number(group, "--report-interval", "interval of load reports", 0.2, metavar="S")
    add_number(group, "--control-latency", "latency of the control channel", 0.001, "S", _zero_or_more)


def _configure_fleet(group: "argparse._ArgumentGroup") -> None:
    configure_profile(group)
    group.add_argument(
        "--engine",
        type=EngineKind,
        choices=list(EngineKind),
        default=EngineKind.MODEL,
        help="scheduling of the engines: the engine model, or the installed vLLM's own scheduler, which is "
        "slower (default: %(default)s)",
    )
    size = group.add_mutually_exclusive_group()
    add_whole(size, "--replicas", "replicas in one pool", 4)
    size.add_argument(
        "--pools",
        type=pools,
        metavar="NAME:N[:CONTEXT[:PROFILE]],...",
        help="replicas of several pools, by increasing context, such as short:3,long:1 or "
        "short:4:8192,mid:2:32768,long:1",
    )
    add_whole(
        group,
        "--b-short",
        "with several pools: maximum token budget of the first, and its context unless --pools sets one "
        "(default: 8192, or that context if smaller)",
    )
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="use the pools of a configuration instead of --replicas, --pools and --b-short; --profile is "
        "then the profile of its vLLM engines",
    )
    size.add_argument(
        "--like-running",
        action="store_true",
        help="use the pools of a running application (--url), with the step times that its tuner has fitted "
        "to the engines",
    )
    for name in _ENGINE_FIELDS:
        if name != "scheduling_policy":
            flag = name.replace("_", "-")
            add_whole(group, f"--{flag}", f"{name} of each engine (default: the profile's)")
    group.add_argument(
        "--scheduling-policy",
        type=SchedulingPolicy,
        choices=list(SchedulingPolicy),
        help="of each engine's own queue",
    )


def _configure_results(group: "argparse._ArgumentGroup") -> None:
    add_whole(group, "--short-at", "maximum tokens of a short prompt", SHORT_AT_TOKENS)
    add_number(group, "--slo-ttft-s", "TTFT limit of short prompts", 1.0)
    add_number(group, "--slo-long-ttft-s", "TTFT limit of other prompts", 10.0)
    add_number(group, "--slo-tpot-s", "TPOT limit", 0.1)
    warm_up = "share of requests to exclude at the beginning"
    add_number(group, "--warm-up", warm_up, 0.1, kind=_zero_or_more)
    group.add_argument("--json", type=Path, metavar="OUT", help="write metrics and provenance")
    group.add_argument(
        "--save-partition",
        type=Path,
        metavar="FILE",
        help="write the final length queues of the first run that learned any, for --partition",
    )
    group.add_argument(
        "--log", type=Path, metavar="FILE", help="write the decision log, one JSON object per line"
    )
    add_jobs(group, "; --log uses one")


def runs(args: argparse.Namespace, learned: PartitionSource) -> list[RunSettings]:
    """Return one run per policy and seed, all at the rate of the trace or of `--rate`.

    Args:
        learned: source of the learner for `--partition learned`.

    Raises:
        ServeAppError: the arguments do not describe a valid run.
        ValueError: an argument is out of range.
    """
    partition = partition_source(args.partition, learned)
    replicas = replace(fleet(args), engine_kind=args.engine)
    return [
        RunSettings(
            policy=policy.strip(),
            fleet=replicas,
            trace=trace_choice(args),
            seed=seed,
            rate_per_s=args.rate,
            disclosure=Disclosure(
                output_known=args.max_output == "known", queue_timeout_s=args.queue_timeout_s
            ),
            simulation=SimulationSettings(
                control_latency_s=args.control_latency, report_interval_s=args.report_interval
            ),
            scheduler=settings_of(args),
            partition=partition,
            slo=_slo(args),
            short_at_tokens=args.short_at,
            warm_up_ratio=args.warm_up,
        )
        for policy in args.policy.split(",")
        for seed in range(args.first_seed, args.first_seed + args.seeds)
    ]


def fleet_of_file(path: Path, profile: str) -> FleetSettings:
    """Return the pools of the first model of a configuration.

    Args:
        profile: profile of vLLM engines, for which the file has none.

    Raises:
        SettingsError: the file is not a configuration, or its engines are external servers.
    """
    # Imported here because it takes a second and only `--config` needs it.
    from serve_app.settings.application import load_settings  # noqa: PLC0415 - see above

    model = load_settings(path).models[0]
    return FleetSettings(
        profile=profile,
        # Pools that scale count with their maximum number of replicas.
        replicas={
            pool.name: pool.fixed_replicas or (pool.autoscaling.max_replicas if pool.autoscaling else 1)
            for pool in model.pools
        },
        b_short_tokens=model.scheduler.routing.b_short_tokens,
        by_pool={pool.name: _changes_of(pool) for pool in model.pools},
    )


def fleet_of_running(client: ApplicationClient, given: EngineChanges) -> FleetSettings:
    """Return the pools of the first model of a running application, as its tuner's twin models them.

    Args:
        given: limits that the engines do not report.

    Raises:
        SettingsError: the step times or the limits of a pool are not known.
    """
    model = client.models("/debug/status")[0]
    name = model["model"]
    fitted = engines_of_json(((model.get("tuner") or {}).get("twin") or {}).get("engines") or {})
    replicas: dict[str, list[Mapping[str, Any]]] = {}
    for each in model.get("replicas", {}).values():
        replicas.setdefault(each["pool"], []).append(each)
    # Runs load profiles by their path, also in other processes.
    folder = Path(tempfile.mkdtemp(prefix="ewsjf-profiles-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pools_of, changes = {}, {}
    for pool in (each for each in model.get("pools", ()) if each in replicas):
        if pool not in fitted:
            raise SettingsError(
                f"the step times of pool {pool} of model {name} are not known: its tuner fits them to the "
                "engines within some minutes of traffic, unless it is off; pass --profile, or use `calibrate`"
            )
        profile = _profile_of(replicas[pool][0], fitted[pool].step_time, given)
        save_profile(profile, folder / f"{pool}.yaml", source=f"Pool {pool} of {client.url}.")
        pools_of[pool] = PoolArgument(len(replicas[pool]), profile.max_model_len)
        # A limit that is not reported is left to the runs.
        chunk = given.long_prefill_token_threshold
        reported = replicas[pool][0].get("long_prefill_token_threshold")
        limits = EngineChanges(
            long_prefill_token_threshold=reported if chunk is None else chunk,
            # Without it, the context of the first pool would end at its boundary.
            max_model_len=given.max_model_len or profile.max_model_len,
        )
        changes[pool] = PoolChanges(profile=str(folder / f"{pool}.yaml"), engine=limits)
    if not pools_of:
        raise SettingsError(f"model {name} at {client.url} has no replica: wait until one is ready")
    return FleetSettings(
        profile=next(iter(changes.values())).profile or "",
        replicas={pool: each.replicas for pool, each in pools_of.items()},
        b_short_tokens=_b_short(list(pools_of.values())),
        by_pool=changes,
    )


def _profile_of(replica: Mapping[str, Any], step_time: StepTimeModel, given: EngineChanges) -> EngineProfile:
    """Return the profile of an engine, with the limits that it reports and, for others, the given ones."""
    limits = {
        "kv_tokens": replica["kv_tokens"] or given.kv_tokens,
        "max_model_len": replica["max_model_len"]
        or replica.get("learned_context_tokens")
        or given.max_model_len,
        "max_num_seqs": replica["max_num_seqs"] or given.max_num_seqs,
        "max_num_batched_tokens": replica["max_num_batched_tokens"] or given.max_num_batched_tokens,
    }
    for limit in ("kv_tokens", "max_model_len"):
        if limits[limit] is None:
            flag = f"--{limit.replace('_', '-')}"
            raise SettingsError(f"the engines of pool {replica['pool']} do not report {limit}: pass {flag}")
    return EngineProfile(
        step_time=step_time, **{name: each for name, each in limits.items() if each is not None}
    )


def _changes_of(pool: "PoolSettings") -> PoolChanges:
    hosted = pool.engine.hosted
    if hosted is None:
        raise SettingsError(f"pool {pool.name} has remote engines, whose speed is unknown: use --pools")
    limits = hosted.batch_limits()
    return PoolChanges(
        profile=hosted.simulated_profile,
        engine=_ENGINE.validate_python({name: limits.get(name) for name in _ENGINE_FIELDS}),
        cost=pool.cost,
        boundary_tokens=pool.boundary_tokens,
    )


def _slo(args: argparse.Namespace) -> SloByLength:
    return SloByLength(
        ttft_s=args.slo_ttft_s,
        tpot_s=args.slo_tpot_s,
        long_ttft_s=args.slo_long_ttft_s,
        short_at_tokens=args.short_at,
    )


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the values of `--set PATH=VALUE`, which are YAML, by path."""
    found = {}
    for text in args.set:
        path, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set must be PATH=VALUE, got {text!r}")
        try:
            found[path.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"--set {path}: {value!r} is not a value in YAML") from None
    return found


def _zero_or_more(text: str) -> float:
    """Parse a finite number of at least 0."""
    return 0.0 if text.strip() in {"0", "0.0"} else positive_float(text)
