"""Command `explain`: prints where the time of a request or program went."""

import argparse
import json
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from serve_app.cli.application import ApplicationClient, add_address
from serve_app.cli.command import print_result
from serve_app.lab.tables import documents_table, table_text

EXAMPLE = """example:
  ewsjf explain hdt8aikd-195
  ewsjf explain --program my-agent
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "request_id", nargs="?", help="`x-request-id` or `id` of the response, or the client's own id"
    )
    what.add_argument(
        "--program",
        metavar="ID",
        help="show where the time of an agent program went; `status` lists their ids",
    )
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    client = ApplicationClient(args)
    if args.program is not None:
        document = client.document(f"/debug/programs/{_quoted(args.program)}", "programs")
        lines = _format_programs(document["programs"])
    else:
        document = client.document(f"/debug/requests/{_quoted(args.request_id)}", "stages", "queue")
        lines = _format_receipt(document)
    print_result(json.dumps(document, indent=1) if args.json else "\n".join(lines))
    return 0


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


# -- requests ----------------------------------------------------------------------------------------------


def _format_receipt(receipt: Mapping[str, Any]) -> Iterator[str]:
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
    yield _shares("stage", "ms", (part for stage in stages for part in _with_parts(stage)), total_ms)
    queue = receipt["queue"]
    if queue["causes"]:
        causes = sorted(queue["causes"], key=lambda each: -each["ms"])
        parts = ((each["meaning"], each["ms"]) for each in causes)
        yield _shares(f"cause of the wait ({queue['ms']:,.1f} ms)", "ms", parts, queue["ms"])
    if queue["ahead"]:
        ahead = ", ".join(f"{count:,} ({cause.replace('_', ' ')})" for cause, count in queue["ahead"].items())
        yield f"\nrequests that took a slot it could have used: {ahead}"
    if served := queue.get("served"):
        yield _served(served)
    if queue["predicted_ms"] is not None:
        kind = "actual" if receipt["outcome"] else "so far"
        yield f"predicted wait: {queue['predicted_ms']:,.1f} ms, {kind}: {queue['ms']:,.1f} ms"
    if target := receipt.get("latency_target"):
        yield _target(target)
    if gap := receipt.get("longest_gap"):
        tokens = gap["prefill_tokens"]
        cause = (
            f"beside a prefill of {tokens:,} tokens" if tokens else f"cause: {gap['cause'].replace('_', ' ')}"
        )
        yield f"longest gap of the stream: {gap['ms']:,.1f} ms, {cause}"
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


def _target(target: Mapping[str, Any]) -> str:
    """Describe the latency target of a request, and what became of it."""
    limits = [
        f"{limit_ms:,.9g} ms {name}"
        for limit_ms, name in (
            (target["ttft_ms"], "to the first token"),
            (target["tpot_ms"], "per output token"),
        )
        if limit_ms is not None
    ]
    text = f"latency target: {', '.join(limits)}"
    if target["expected_ttft_ms"] is not None:
        text += f"; expected first token after {target['expected_ttft_ms']:,.0f} ms"
    if target["chance_of_miss"] is not None:
        text += f", chance of a miss {target['chance_of_miss']:.0%}"
    verdict = {True: "; in time", False: "; late"}
    return text + verdict.get(target["ttft_met"], "")


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


# -- programs ----------------------------------------------------------------------------------------------


def _format_programs(programs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the receipts of programs as lines, with an empty line between them."""
    for number, program in enumerate(programs):
        if number:
            yield ""
        yield from _format_program(program)


def _format_program(program: Mapping[str, Any]) -> Iterator[str]:
    """Yield the receipt of a program as lines for a terminal."""
    yield (
        f"{program['program']}: {program['state']}, {program['turns']:,} turns of "
        f"{program['conversations']:,} conversations, tenant {program['tenant']}, model {program['model']}, "
        f"started {program['age_s']:,.0f} s ago"
    )
    times = list(_times_of(program))
    total_s = sum(seconds for name, seconds in times if not name.startswith(" "))
    yield _shares("time of all turns", "s", times, total_s)
    yield "sums over all conversations, which overlap; gaps include the time of sub-agents"
    tokens = program["tokens"]
    new = tokens["prompt"] - tokens["cached"] - tokens["again"]
    known = f"{tokens['cached']:,} cached, {tokens['again']:,} computed again, {new:,} new"
    if not tokens["cached"]:
        known = "not known how many were cached: the engines report none"
    yield f"\ntokens: prompt {tokens['prompt']:,} ({known}), output {tokens['output']:,}"
    if program["last_turns"]:
        yield f"\nlast {len(program['last_turns'])} turns, in s; earlier ones have no receipt any more"
        yield documents_table(_TURNS, map(_turn, program["last_turns"]), text_columns=3)


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


_TURNS = (
    "request: {request_id} | conversation: {conversation:.30} | state: {state} | gap: {gap_s:,.1f} | "
    "queue: {queued_s:,.1f} | for KV cache: {waiting_s:,.1f} | first token: {first_token_s:,.1f} | "
    "generation: {generation_s:,.1f} | engine: {engine_s:,.1f} | prompt: {prompt_tokens:,} | "
    "cached: {cached_tokens:,} | output: {output_tokens:,}"
)


def _turn(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    conversation = ("sub-agent " if turn["is_sub_agent"] else "") + turn["session"]
    return {**turn, "conversation": conversation or None}


_BAR = 40


def _shares(heading: str, unit: str, parts: Iterable[tuple[str, float]], whole: float) -> str:
    """Return a table of parts, after an empty line."""
    rows = [(name, f"{part:,.1f}", _bar(part, whole)) for name, part in parts]
    return "\n" + table_text((heading, unit, "share"), rows)


def _bar(part: float, whole: float) -> str:
    share = max(0.0, part) / whole if whole > 0 else 0.0
    return f"{'#' * round(share * _BAR):<{_BAR}} {share:4.0%}"
