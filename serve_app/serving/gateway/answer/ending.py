"""The end of an answer, which predicts the next request of the same program.

| answers to         | whole answer                     | stream                                         |
|--------------------|----------------------------------|------------------------------------------------|
| chats, completions | `finish_reason` of the choices   | the same, in the last events up to the usage   |
| Responses          | `status`, and calls in `output`  | the same, in the `response` of the usage event |
| Messages           | `stop_reason`                    | the same, in the `delta` of the usage event    |

Only events near the usage are searched. Of several streamed choices, the last ones to end therefore count.
"""

import re
from collections.abc import Collection

import msgspec

from serve_app.request import TurnEnd

_ENDS: dict[str | None, TurnEnd | None] = {
    None: None,
    "tool_calls": TurnEnd.TOOLS,
    "function_call": TurnEnd.TOOLS,
    "tool_use": TurnEnd.TOOLS,
    "stop": TurnEnd.DONE,
    "end_turn": TurnEnd.DONE,
    "stop_sequence": TurnEnd.DONE,
}
_BY_PRECEDENCE = tuple(TurnEnd)
# Items whose results the client sends; engines run other calls, such as `mcp_call`, themselves.
_CALLS = frozenset({"function_call", "custom_tool_call"})
# JSON escapes quotes inside strings, so generated text cannot match.
_FINISH_REASON = re.compile(rb'"finish_reason":\s*"(\w+)"')


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None


class _Item(msgspec.Struct, gc=False):
    type: str | None = None


class _Answer(msgspec.Struct):
    """A whole answer, or an event that carries the end of one."""

    choices: list[_Choice] = []
    stop_reason: str | None = None
    status: str | None = None
    output: list[_Item] = []
    delta: "_Answer | None" = None
    response: "_Answer | None" = None


_decoder = msgspec.json.Decoder(_Answer)


def ending_of(document: bytes) -> TurnEnd | None:
    """Return the end that a whole answer or the usage event of a stream states; None if it states none."""
    try:
        found = _decoder.decode(document)
    except (ValueError, RecursionError):
        return None
    found = found.response or found.delta or found
    reasons = [found.stop_reason, *[choice.finish_reason for choice in found.choices]]
    ending = combined([_ENDS.get(reason, TurnEnd.OTHER) for reason in reasons])
    if ending is not None or found.status is None:
        return ending
    if found.status != "completed":
        return TurnEnd.OTHER
    return TurnEnd.TOOLS if any(item.type in _CALLS for item in found.output) else TurnEnd.DONE


def ending_in(chunks: bytes) -> TurnEnd | None:
    """Return the end that events of a chat or completion state; None if they state none."""
    return combined([_ENDS.get(reason.decode(), TurnEnd.OTHER) for reason in _FINISH_REASON.findall(chunks)])


def combined(ends: Collection[TurnEnd | None]) -> TurnEnd | None:
    """Return the end of an answer from those of its choices: calls of tools take precedence."""
    for end in _BY_PRECEDENCE:
        if end in ends:
            return end
    return None
