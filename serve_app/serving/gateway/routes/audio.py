"""What requests about sounds ask of an engine: transcriptions and translations, sent as forms.

The tokens follow from the size of the file. Speech has about four tokens to the second. Models hear it in
pieces of thirty seconds, each a sequence of its own in the engine, so a long sound is no long request.
"""

import math

import msgspec

from serve_app.engines.forms import Form, FormError, UploadedFile, duration_s, read_form
from serve_app.errors import Outcome
from serve_app.request import PromptShape, RequestSpec
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.request.parse import ParsedBody

_PIECE_S = 30.0
_TOKENS_PER_S = 4
# The marks with which a decoder is told language and task.
_MARKS = 4
# Text that is given along, as prompts elsewhere.
_BYTES_PER_TOKEN = 3
_TRUE = frozenset({"true", "1", "on", "yes"})


class AudioFields(msgspec.Struct):
    """`/v1/audio/transcriptions` and `/v1/audio/translations`; a form, of which these fields are read."""

    file: bytes
    model: str
    language: str | None = None
    prompt: str | None = None
    stream: bool | None = None
    max_completion_tokens: int | None = None
    user: str | None = None


def read_audio(body: bytes, content_type: bytes) -> ParsedBody:
    """What a request about a sound asks for.

    Raises:
        RequestRefused: it is no form, lacks its model or its file, or has a field twice.
    """
    try:
        form = read_form(body, content_type)
    except FormError as error:
        raise RequestRefused(
            Outcome.REJECTED_INVALID, f"the body is no form: {error}. Send multipart/form-data"
        ) from error
    for name in AudioFields.__struct_fields__:
        if name in form.repeated:
            raise RequestRefused(Outcome.REJECTED_INVALID, f"{name} is given twice: send it once", param=name)
    model, upload = form.fields.get("model"), form.files.get("file")
    if not model:
        raise _missing("model")
    if upload is None:
        raise _missing("file")
    pieces, output_tokens = _pieces(upload)
    limit = _token_limit(form)
    prompt = form.fields.get("prompt", "")
    text_tokens = _MARKS + len(prompt.encode()) // _BYTES_PER_TOKEN
    return ParsedBody(
        spec=RequestSpec(
            model=model,
            shape=PromptShape(
                text_bytes=pieces * len(prompt.encode()), prompt_tokens=pieces * text_tokens, prompts=pieces
            ),
            max_output_tokens=output_tokens if limit is None else min(output_tokens, limit),
            choices=pieces,
            streamed=form.fields.get("stream", "").lower() in _TRUE,
        ),
        user=form.fields.get("user"),
    )


def _pieces(upload: UploadedFile) -> tuple[int, int]:
    """How many sequences an engine makes of a sound, and the tokens of each."""
    seconds = duration_s(upload)
    pieces = max(1, math.ceil(seconds / _PIECE_S))
    return pieces, max(1, math.ceil(_TOKENS_PER_S * seconds / pieces))


def _token_limit(form: Form) -> int | None:
    written = form.fields.get("max_completion_tokens")
    if not written:
        return None
    if not (written.isascii() and written.isdigit() and 0 < int(written[:10]) < 2**31):
        raise RequestRefused(
            Outcome.REJECTED_INVALID,
            f"max_completion_tokens is invalid: {written[:40]!r} is not a whole number above 0",
            param="max_completion_tokens",
        )
    return int(written[:10])


def _missing(name: str) -> RequestRefused:
    return RequestRefused(Outcome.REJECTED_INVALID, f"{name} is missing: add it to the form", param=name)
