"""What a request asks of the text of its answers, beyond some text of some length."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Constraint(Protocol):
    """A rule that the text of an answer follows."""

    def text(self, rng: random.Random) -> str:
        """A text that follows it; raises `ApiError` when there is none."""


class CallForm(Enum):
    """How the request came to a tool call, which decides its text and its finish reason, as in vLLM."""

    NAMED = "named"
    REQUIRED = "required"
    AUTO = "auto"


# What a model writes around the arguments. vLLM asks for a list of calls where one is required, and for the
# arguments alone where the tool is named; the marks of "auto" are those of the Hermes format.
_AROUND_ARGUMENTS = {
    CallForm.NAMED: ("", ""),
    CallForm.REQUIRED: ('[{"name": "%s", "parameters": ', "}]"),
    CallForm.AUTO: ('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The call that an answer consists of."""

    name: str
    arguments: Constraint
    form: CallForm


@dataclass(frozen=True, slots=True)
class RawText:
    """The text of a whole answer, before any limit.

    Attributes:
        arguments: where the arguments of its tool call begin and end.
    """

    text: str
    arguments: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """What a request asks of the text of its answers.

    Attributes:
        seed: the request's, or one derived from its body: equal requests have equal answers.
        constraint: what the text follows; None for placeholder text.
        call: the tool call that the answer is; it replaces the constraint.
        stop: strings that end the answer.
        include_stop: whether the answer then contains the string.
        min_tokens: tokens before which no stop string counts.
        top_logprobs: alternatives per token; None when no logprobs are wanted.
        echo: the text before the answers to each prompt; empty for none.
        continuous_usage: whether each chunk of a stream carries the token counts.
    """

    seed: int
    constraint: Constraint | None = None
    call: ToolCall | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    top_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    continuous_usage: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether texts have to be sampled before the request is admitted."""
        return self.constraint is not None or self.call is not None

    def texts(self, count: int) -> Sequence[RawText]:
        """Texts that follow the constraint; raises `ApiError` when there are none."""
        return [self._text(random.Random(self.seed + index)) for index in range(count)]  # noqa: S311

    def _text(self, rng: random.Random) -> RawText:
        if self.call is not None:
            before, after = _AROUND_ARGUMENTS[self.call.form]
            before = before.replace("%s", self.call.name)
            arguments = self.call.arguments.text(rng)
            span = len(before), len(before) + len(arguments)
            return RawText(f"{before}{arguments}{after}", span)
        assert self.constraint is not None, "only a constrained answer has a text of its own"
        return RawText(self.constraint.text(rng))
