"""Lengths of chats and documents: chats as in a published trace, documents around a mean of some thousand."""

from collections.abc import Iterator, Sequence

from serve_app.settings_base import settings
from serve_app.workloads.lengths import LognormalLengths
from serve_app.workloads.published import RECIPES
from serve_app.workloads.streams import stream

# No prompt is cut here; what no engine can hold is.
_LONGEST_TOKENS = 1_000_000
_ANSWERS_CV, _LONGEST_ANSWER_TOKENS = 0.6, 2_048


@settings
class DocumentMix:
    """What lengths depend on.

    Attributes:
        chats: a published trace whose lengths they have.
        documents_mean, documents_cv: of the documents' prompts, in tokens, lognormal.
        answers_mean: of the documents' answers, in tokens.
    """

    chats: str = "lmsys"
    documents_mean: float = 5_000.0
    documents_cv: float = 0.8
    answers_mean: float = 200.0

    def lengths(self, kinds: Sequence[bool], seed: int, context_tokens: int) -> Iterator[tuple[int, int]]:
        """Prompt and output tokens for each kind (True is a document), prompts cut to the context."""
        count = len(kinds)
        rng = stream(seed, "documents")
        prompts = LognormalLengths(
            mean=self.documents_mean, cv=self.documents_cv, max_tokens=_LONGEST_TOKENS
        ).sample(count, rng)
        outputs = LognormalLengths(
            mean=self.answers_mean, cv=_ANSWERS_CV, max_tokens=_LONGEST_ANSWER_TOKENS
        ).sample(count, rng)
        chats = RECIPES[self.chats].lengths(count, stream(seed, "chats"))
        for place, is_document in enumerate(kinds):
            prompt, output = (prompts, outputs) if is_document else chats
            yield min(int(prompt[place]), context_tokens - int(output[place]) - 1), int(output[place])
