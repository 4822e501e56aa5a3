"""Requests about sounds, and their answers: words as many as the sound is long, whatever it says."""

from serve_app.engines.emulated.answers.completions import ChatAnswer, encode
from serve_app.engines.emulated.errors import invalid, not_emulated
from serve_app.engines.emulated.requests import Generation
from serve_app.engines.emulated.text import PseudoTokenizer
from serve_app.engines.forms import FormError, duration_s, read_form

_TOKENS_PER_S = 4
_TRUE = frozenset({"true", "1", "on", "yes"})


class TranscriptionAnswer(ChatAnswer):
    """An answer of `/v1/audio/transcriptions` or `/v1/audio/translations`."""

    _chunk_kind = "transcription.chunk"

    def opening(self) -> bytes:
        """Nothing: the stream begins with the first token."""
        return b""

    def whole(self) -> bytes:
        """The text alone."""
        return encode({"text": self._head.whole_text(0)})


def read_audio(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """A request about a sound. A form begins with its boundary, which stands in its head as well."""
    first = raw.partition(b"\r\n")[0]
    try:
        form = read_form(raw, b"multipart/form-data; boundary=" + first.removeprefix(b"--"))
    except FormError as error:
        raise invalid(str(error)) from error
    upload = form.files.get("file")
    if upload is None:
        raise invalid("a file is needed", param="file")
    wanted = form.fields.get("response_format", "json")
    if wanted != "json":
        raise not_emulated(f"response_format {wanted}")
    return Generation(
        model=form.fields.get("model"),
        prompts=[tokenizer.prompt_of_text(form.fields.get("prompt", "").encode() or b"-")],
        max_tokens=None,
        stream=form.fields.get("stream", "").lower() in _TRUE,
        include_usage=form.fields.get("stream_include_usage", "").lower() in _TRUE,
        exact_output_tokens=max(1, round(_TOKENS_PER_S * duration_s(upload))),
    )
