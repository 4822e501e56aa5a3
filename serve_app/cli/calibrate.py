"""Command `calibrate`: fits an engine profile to the timestamps of its requests."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from serve_app.cli.command import add_whole, print_result, progress_bar, warn, write_json, writing
from serve_app.engines.model.roofline import EngineProfile, load_profile, save_profile
from serve_app.errors import SettingsError
from serve_app.lab.calibration import (
    EXPECTED_REPLAYS,
    MIN_FITTED,
    Accuracy,
    CalibrationError,
    Measurements,
    compare,
    fit_step_time,
    initial_coefficients,
    measured,
    read_measurements,
    replay,
)
from serve_app.lab.tables import table_text

EXAMPLE = """example:
  ewsjf calibrate --measurements result.json --kv-tokens 41408 --max-model-len 16384 \\
      --out out/my-model-my-gpu-tp1.yaml

Errors are measured on the held-out requests, whose arrivals and lengths are replayed. They compare statistics
of the distributions (mean with mean, p90 with p90).
"""
# Default of --fit-first: two thirds show the engine filling up and at its limits, and a third gives a stable
# p90.
_DEFAULT_FIT_RATIO = 2 / 3
# Minimum number of requests for a p90.
_MIN_UNSEEN = 10
_LIMITS = ("kv_tokens", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpus")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--measurements",
        type=Path,
        required=True,
        metavar="FILE",
        help="result of `vllm bench serve --save-result --save-detailed`, or an engine's timestamps",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PROFILE.yaml", help="profile to write")
    add_whole(
        parser, "--fit-first", "number of requests to fit, by arrival (default: two thirds)", metavar="N"
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="also write the profile and its errors as JSON"
    )
    limits = parser.add_argument_group("limits of the engine", "default: those of --profile")
    limits.add_argument("--profile", metavar="NAME", help="profile that provides the limits")
    add_whole(limits, "--kv-tokens", "capacity of the KV cache", metavar="TOKENS")
    add_whole(limits, "--max-model-len", "context limit", metavar="TOKENS")
    add_whole(limits, "--max-num-seqs", "maximum batch size", metavar="N")
    add_whole(limits, "--max-num-batched-tokens", "token budget per iteration", metavar="TOKENS")
    add_whole(limits, "--gpus", "GPUs per engine", metavar="N")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    _check_outputs(args)
    measurements = read_measurements(args.measurements)
    _report_skipped(measurements)
    if measurements.of_client:
        warn("the timestamps are those of a client: TTFT includes the network and the tokenizer")
    requests = measurements.requests
    fit_first = _fit_first(args.fit_first, len(requests))
    profile = _limits(args, measurements, fit_first)
    settings = profile.model_settings()
    with progress_bar("replays", EXPECTED_REPLAYS) as on_replay:
        step_time = fit_step_time(requests, fit_first, settings, on_replay)
    profile = replace(profile, step_time=step_time)
    unseen = slice(fit_first, None)
    played = replay(requests, settings, step_time, part=unseen)
    accuracy = compare(played, measured(requests[unseen]))
    unseen_count = len(requests) - fit_first
    print_result(f"{unseen_count} held-out requests (of {len(requests)})\n\n{_table(accuracy)}\n")
    print_result(
        f"for prefill isolation, set the engine's long_prefill_token_threshold to {step_time.chunk_tokens()}"
    )
    with writing(args.out) as draft:
        source = _source(args.measurements, accuracy, fit_first, len(requests))
        save_profile(profile, draft, source=source)
    if args.json:
        write_json(args.json, _document(profile, accuracy, measurements, fit_first))
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Validate the output paths before the work."""
    if args.out.suffix not in {".yaml", ".yml"}:
        raise SettingsError(f"--out {args.out}: the file name of a profile must end in .yaml")
    for path in (args.out, args.json):
        # A missing folder such as `out` is created. If its parent is missing as well, the path is probably
        # wrong.
        if path is not None and not path.parent.parent.is_dir():
            raise SettingsError(f"{path}: directory {path.parent} does not exist")


def _report_skipped(measurements: Measurements) -> None:
    for reason, rows in measurements.skipped.most_common():
        warn(f"{rows} row{'s' if rows > 1 else ''} skipped: {reason}")


def _fit_first(wanted: int | None, available: int) -> int:
    most = available - _MIN_UNSEEN
    if wanted is None:
        wanted = round(available * _DEFAULT_FIT_RATIO)
    if not MIN_FITTED <= wanted <= most:
        raise CalibrationError(
            f"cannot fit {wanted} of {available} readable requests: at least {MIN_FITTED} are needed for the "
            f"fit and {_MIN_UNSEEN} held out; measure more, or change --fit-first"
        )
    return wanted


def _limits(args: argparse.Namespace, measurements: Measurements, fit_first: int) -> EngineProfile:
    """Return the engine's limits, with the step-time model from which the fit starts.

    Raises:
        SettingsError: a limit is missing.
        CalibrationError: the limits contradict the measurements.
    """
    given: dict[str, Any] = {name: getattr(args, name) for name in _LIMITS if getattr(args, name) is not None}
    step_time = initial_coefficients(measurements.requests[:fit_first])
    if args.profile:
        profile = replace(load_profile(args.profile), step_time=step_time, **given)
    else:
        for name in ("kv_tokens", "max_model_len"):
            if name not in given:
                flag = f"--{name.replace('_', '-')}"
                raise SettingsError(f"the engine's {name} is unknown: pass {flag}, or --profile NAME")
        profile = EngineProfile(step_time=step_time, **given)
    longest = max(request.prompt_tokens + request.output_tokens for request in measurements.requests)
    if longest > profile.max_model_len:
        raise CalibrationError(
            f"a measured request has {longest:,} tokens, more than max_model_len {profile.max_model_len:,}: "
            "raise --max-model-len to that of the measured engine"
        )
    return profile


def _document(
    profile: EngineProfile, accuracy: dict[str, Accuracy], measurements: Measurements, fit_first: int
) -> dict[str, Any]:
    return {
        "profile": asdict(profile),
        "errors": {metric: asdict(found.errors) for metric, found in accuracy.items()},
        "measured": {metric: asdict(found.measured) for metric, found in accuracy.items()},
        "played": {metric: asdict(found.played) for metric, found in accuracy.items()},
        "requests": {
            "fitted": fit_first,
            "unseen": len(measurements.requests) - fit_first,
            "skipped": dict(measurements.skipped),
        },
    }


def _source(path: Path, accuracy: dict[str, Accuracy], fit_first: int, total: int) -> str:
    lines = [f"Fitted by `calibrate` to the first {fit_first} of {total} requests in {path.name}."]
    lines += ["Errors of the statistics on the others:"]
    for metric, found in accuracy.items():
        figures = ", ".join(f"{name} {error:+.1%}" for name, error in asdict(found.errors).items())
        lines.append(f"  {metric}: {figures}")
    return "\n".join(lines)


def _table(accuracy: dict[str, Accuracy]) -> str:
    rows = []
    for metric, found in accuracy.items():
        replayed, errors = asdict(found.played), asdict(found.errors)
        for name, value in asdict(found.measured).items():
            rows.append((metric, name, f"{value:.4f}", f"{replayed[name]:.4f}", f"{errors[name]:+.2%}"))
    return table_text(("", "", "measured s", "replayed s", "error"), rows, text_columns=2, key_columns=2)
