"""Command `explain`: prints where the time of a request or program went, and what would have shortened it."""

import argparse
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.cli.application import ApplicationClient, add_address
from serve_app.cli.command import Command, print_result, progress_bar
from serve_app.errors import ServeAppError
from serve_app.lab.tables import table_text
from serve_app.tuning.counterfactuals.recording import (
    Recording,
    decode_recording,
    example_of_tenant,
    with_tenant_name,
)

# -- what-if results ---------------------------------------------------------------------------------------


def format_what_if(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about the replay, a table of changes, and the most effective one."""
    replay, recorded = result["replay"], result["recorded"]
    begins = "from an idle fleet" if replay["begins_idle"] else "with the requests in flight"
    yield (
        f"what if: {replay['requests']:,} requests of {replay['seconds']:,.0f} s replayed {begins}, policy "
        f"{result['policy']}, step times: {replay['engines']}"
    )
    yield (
        f"wait in the unchanged replay {replay['wait_ms']:,.1f} ms, recorded wait "
        f"{recorded['wait_ms']:,.1f} ms; error of the replay for similar requests (p90): "
        f"{replay['bar_ms']:,.1f} ms"
    )
    if not replay["reproduces"]:
        yield (
            "the replay does not reproduce this wait: the difference exceeds its error. The intervals below "
            "are widened by that difference"
        )
    rows = [_row(each) for each in result["changes"]]
    heads = ("change", "wait, ms", "90 % interval", "difference, ms", "TTFT, ms", "90 % interval")
    yield "\n" + table_text(heads, rows)
    notes = [f"{each['label']}: {each['note']}" for each in result["changes"] if each["note"]]
    yield from notes
    yield "\n" + _best(result)


def _row(change: Mapping[str, Any]) -> tuple[str, ...]:
    wait, ttft = change["wait"], change["ttft"]
    if wait is None:
        return change["label"], "-", "", "", "", ""
    return (
        change["label"],
        f"{wait['ms']:,.0f}",
        _interval(wait),
        f"{wait['difference_ms']:+,.0f}",
        f"{ttft['ms']:,.0f}" if ttft is not None else "-",
        _interval(ttft) if ttft is not None else "",
    )


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['low_ms']:,.0f} to {estimate['high_ms']:,.0f}"


def _best(result: Mapping[str, Any]) -> str:
    best = next((each for each in result["changes"] if each["label"] == result["best"]), None)
    if best is None:
        return "no change would have reduced the wait by more than the error of the replay"
    wait = best["wait"]
    return (
        f"largest reduction: {best['label']}, a wait of {wait['ms']:,.0f} ms instead of "
        f"{result['recorded']['wait_ms']:,.0f} ms"
    )


# -- programs ----------------------------------------------------------------------------------------------


def format_program(program: Mapping[str, Any]) -> Iterator[str]:
    """Yield the receipt of a program as lines for a terminal."""
    yield (
        f"{program['program']}: {program['state']}, {program['turns']:,} turns of "
        f"{program['conversations']:,} conversations, tenant {program['tenant']}, model {program['model']}, "
        f"started {program['age_s']:,.0f} s ago"
    )
    times = list(_times_of(program))
    total_s = sum(seconds for name, seconds in times if not name.startswith(" "))
    rows = [(name, f"{seconds:,.1f}", _bar(seconds, total_s)) for name, seconds in times]
    yield "\n" + table_text(("time of all turns", "s", "share"), rows)
    yield "sums over all conversations, which overlap; gaps include the time of sub-agents"
    tokens = program["tokens"]
    new = tokens["prompt"] - tokens["cached"] - tokens["again"]
    known = f"{tokens['cached']:,} cached, {tokens['again']:,} computed again, {new:,} new"
    if not tokens["cached"]:
        known = "not known how many were cached: the engines report none"
    yield f"\ntokens: prompt {tokens['prompt']:,} ({known}), output {tokens['output']:,}"
    if program["last_turns"]:
        yield f"\nlast {len(program['last_turns'])} turns, in s; earlier ones have no receipt any more"
        turns = [_turn_row(turn) for turn in program["last_turns"]]
        yield table_text(_TURN_HEADS, turns, text_columns=3)


def _times_of(program: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield "queue", program["queued_s"]
    yield "  of this: for KV cache", program["waiting_s"]
    yield "engine until the first token", program["first_token_s"]
    tokens = program["tokens"]
    computed = tokens["prompt"] - tokens["cached"]
    if tokens["cached"] and computed:
        share = tokens["again"] / computed
        yield "  of this: context computed again (by tokens)", share * program["first_token_s"]
        yield "  of this: new tokens (by tokens)", (1 - share) * program["first_token_s"]
    yield "generation", program["generation_s"]
    yield (
        "engine, answers not streamed",
        max(0.0, program["engine_s"] - program["first_token_s"] - program["generation_s"]),
    )
    yield "gaps after calls of tools", program["tool_gap_s"]
    yield "other gaps", program["gap_s"] - program["tool_gap_s"]


_TURN_TIMES = ("gap_s", "queued_s", "waiting_s", "first_token_s", "generation_s", "engine_s")
_TURN_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")
_HEADS = (
    "request,conversation,state,gap,queue,for KV cache,first token,generation,engine,prompt,cached,output"
)
_TURN_HEADS = tuple(_HEADS.split(","))


def _turn_row(turn: Mapping[str, Any]) -> tuple[str, ...]:
    conversation = ("sub-agent " if turn["is_sub_agent"] else "") + turn["session"]
    times = ("-" if turn[name] is None else f"{turn[name]:,.1f}" for name in _TURN_TIMES)
    tokens = ("-" if turn[name] is None else f"{turn[name]:,}" for name in _TURN_TOKENS)
    return turn["request_id"], conversation[:_MAX_NAME] or "-", turn["state"], *times, *tokens


# -- command -----------------------------------------------------------------------------------------------


_EXAMPLE = """example:
  ewsjf explain hdt8aikd-195
  ewsjf explain hdt8aikd-195 --what-if
  ewsjf explain --program my-agent
"""
_BAR = 40
_MAX_NAME = 30


class ExplainError(ServeAppError):
    """The application has no such request, or the arguments contradict each other."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request_id", nargs="?", help="`x-request-id` or `id` of the response, or the client's own id"
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="replay the minutes around the request with one change at a time (its class, one more replica, "
        "other policies, fewer long prefills or other requests) and show its wait with an interval",
    )
    parser.add_argument(
        "--program",
        metavar="ID",
        help="show where the time of an agent program went; `status` lists their ids",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the receipt, or the result of --what-if, as JSON"
    )
    add_address(parser)


def _run(args: argparse.Namespace) -> int:
    if (args.request_id is None) == (args.program is None) or (args.program is not None and args.what_if):
        raise ExplainError("give a request, with or without --what-if, or --program ID")
    if args.program is not None:
        document = json.loads(_fetch(args))
        texts = ("\n".join(format_program(each)) for each in document["programs"])
        print_result(json.dumps(document, indent=1) if args.json else "\n\n".join(texts))
        return 0
    if args.what_if:
        result = _with_name(_what_if(decode_recording(_fetch(args, "/recording"))), args)
        print_result(json.dumps(result, indent=1) if args.json else "\n".join(format_what_if(result)))
        return 0
    receipt: Mapping[str, Any] = json.loads(_fetch(args))
    print_result(json.dumps(receipt, indent=1) if args.json else "\n".join(format_receipt(receipt)))
    return 0


def _what_if(recording: Recording) -> Mapping[str, Any]:
    # Imported here because it imports the simulator, which no other path needs.
    from serve_app.tuning.counterfactuals.what_if import replay_count, what_if  # noqa: PLC0415

    with progress_bar("replays", replay_count(recording)) as advance:
        return what_if(recording, advance)


def _with_name(result: Mapping[str, Any], args: argparse.Namespace) -> Mapping[str, Any]:
    """Replace the placeholder by the tenant's name if the receipt of its example request still exists."""
    example = example_of_tenant(result)
    if not example:
        return result
    try:
        receipt = json.loads(_fetch(args, of=example))
    except ExplainError:
        return result
    return with_tenant_name(result, receipt["tenant"])


def _fetch(args: argparse.Namespace, part: str = "", of: str = "") -> bytes:
    """Return the application's answer for the request, or for the request `of`."""
    client = ApplicationClient(args)
    name = urllib.parse.quote(of or args.request_id or args.program, safe="")
    path = f"/debug/{'requests' if args.program is None else 'programs'}/{name}{part}"
    answer = client.answer(path)
    if answer.status == 404 and args.request_id is not None:
        raise ExplainError(
            f"no receipt of {args.request_id!r}: receipts of the last 20,000 requests are available for ten "
            "minutes after a request's end, until the scheduler restarts. Requests that a gateway itself "
            "rejects (invalid body, key or model) have none: see the response and the gateway's log line"
        )
    return client.checked(path, answer).body


def format_receipt(receipt: Mapping[str, Any]) -> Iterator[str]:
    """Yield the receipt as lines for a terminal."""
    stages = [stage for stage in receipt["stages"] if stage["ms"] is not None]
    total_ms = sum(stage["ms"] for stage in stages)
    state = receipt["outcome"] or f"{receipt['state']} now"
    yield (
        f"{receipt['request_id']}: {state}, {receipt['class']} of tenant {receipt['tenant']}, "
        f"model {receipt['model']}, {total_ms:,.1f} ms"
    )
    if receipt["message"]:
        yield receipt["message"]
    if "position" in receipt["queue"]:
        yield _place(receipt["queue"])
    rows = [
        (name, f"{each_ms:,.1f}", _bar(each_ms, total_ms))
        for stage in stages
        for name, each_ms in _with_parts(stage)
    ]
    yield "\n" + table_text(("stage", "ms", "share"), rows)
    queue = receipt["queue"]
    if queue["causes"]:
        causes = sorted(queue["causes"], key=lambda each: -each["ms"])
        rows = [(each["meaning"], f"{each['ms']:,.1f}", _bar(each["ms"], queue["ms"])) for each in causes]
        yield "\n" + table_text((f"cause of the wait ({queue['ms']:,.1f} ms)", "ms", "share"), rows)
    if queue["ahead"]:
        ahead = ", ".join(f"{count:,} ({cause.replace('_', ' ')})" for cause, count in queue["ahead"].items())
        yield f"\nrequests that took a slot it could have used: {ahead}"
    if served := queue.get("served"):
        yield _served(served)
    if queue["predicted_ms"] is not None:
        kind = "actual" if receipt["outcome"] else "so far"
        yield f"predicted wait: {queue['predicted_ms']:,.1f} ms, {kind}: {queue['ms']:,.1f} ms"
    for number, attempt in enumerate(receipt["attempts"], start=1):
        yield (
            f"attempt {number}: pool {attempt['pool']}, replica {attempt['replica']}, length queue "
            f"{attempt['length_queue']}, expected prefill {attempt['expected_prefill_ms']:,.1f} ms"
        )
    tokens = receipt["tokens"]
    if tokens["prompt"] is not None:
        yield (
            f"tokens: prompt {tokens['prompt']:,} (expected {tokens['expected_prompt'] or 0:,.0f}, "
            f"{tokens['cached'] or 0:,} cached), output {tokens['output']:,} "
            f"(expected {tokens['expected_output'] or 0:,.0f})"
        )


def _place(queue: Mapping[str, Any]) -> str:
    """Describe the queue position of a waiting request."""
    position = (
        "queued" if queue["position"] is None else f"position {queue['position']:,} of {queue['waiting']:,}"
    )
    expected = queue["expected_ms"]
    start = "" if expected is None else f"; expected to start in {expected:,.0f} ms{_start_interval(queue)}"
    timeout = f"queue timeout in {queue['expires_in_ms']:,.0f} ms"
    return f"{position} for pool {queue['pool']} ({queue['meaning']}){start}; {timeout}"


def _start_interval(queue: Mapping[str, Any]) -> str:
    between = queue.get("expected_between_ms")
    return "" if between is None else f" (80 % interval: {between[0]:,.0f} to {between[1]:,.0f} ms)"


def _with_parts(stage: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield a stage, followed by its parts as far as they are known."""
    yield stage["stage"].replace("_", " "), stage["ms"]
    for part in stage.get("parts", ()):
        kind = " (estimated)" if part["estimated"] else ""
        yield f"  of this: {part['part'].replace('_', ' ')}{kind}", part["ms"]


def _served(served: Mapping[str, Any]) -> str:
    """Describe whose requests were dispatched to the pool while this one waited."""
    named = [f"{each['requests']:,} {each['class']} of tenant {each['tenant']}" for each in served["by"]]
    if served["others"]:
        named.append(f"{served['others']:,} of other tenants")
    least = "" if served["is_complete"] else "at least "
    return f"dispatched to pool {served['pool']} during the wait: {least}{', '.join(named) or 'none'}"


def _bar(part: float, whole: float) -> str:
    share = max(0.0, part) / whole if whole > 0 else 0.0
    return f"{'#' * round(share * _BAR):<{_BAR}} {share:4.0%}"


COMMAND = Command(example=_EXAMPLE, configure=_configure, run=_run)
