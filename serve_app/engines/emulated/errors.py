"""Error responses of the emulated engine, in vLLM's words and OpenAI's format."""

from http import HTTPStatus
from typing import Any, NoReturn

import msgspec

from serve_app.errors import ServeAppError


class ApiError(ServeAppError):
    """A request that is answered with an error.

    Args:
        status: HTTP status, also the `code` of the error object, as in vLLM.
        message: text for the client.
        kind: the error object's `type`.
        param: the invalid field.
    """

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": param, "code": status}}
        )


def invalid(message: str, *, param: str | None = None, value: Any = None) -> ApiError:
    """An invalid request: 400."""
    extras = [f"{name}={item}" for name, item in (("parameter", param), ("value", value)) if item is not None]
    if extras:
        message = f"{message} ({', '.join(extras)})"
    return ApiError(400, message, kind="BadRequestError", param=param)


def unreadable(message: str) -> ApiError:
    """A body that is not a request: 400."""
    return ApiError(400, f"1 validation error:\n  {message}", kind="Bad Request")


def not_emulated(field: str) -> ApiError:
    """A field, or a use of it, that would change the answer in a way that is not emulated: 400."""
    return invalid(f"{field} is not supported by the emulated engine.", param=field.partition(" ")[0])


def no_such_route(status: int) -> ApiError:
    """A path or a method that is not served: 404 or 405."""
    phrase = HTTPStatus(status).phrase
    return ApiError(status, phrase, kind=phrase)


def unknown_model(model: str, served: tuple[str, ...]) -> ApiError:
    """A model that the engine does not serve: 404."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}."
    return ApiError(404, message, kind="NotFoundError", param="model")


def queue_is_full() -> ApiError:
    """`max_num_queued_reqs` is reached: 503."""
    message = (
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance."
    )
    return ApiError(503, message, kind="Service Unavailable")


def engine_failed() -> ApiError:
    """The engine stopped while the request was in it: 500."""
    return ApiError(500, "EngineCore encountered an issue.", kind="InternalServerError")


def refuse_long_prompt(tokens: int, max_model_len: int) -> NoReturn:
    """Refuse a prompt that exceeds the context limit."""
    raise invalid(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{tokens} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        param="input_tokens",
        value=tokens,
    )


def refuse_full_prompt(tokens: int) -> NoReturn:
    """Refuse a prompt that fills the context and leaves no token for an answer."""
    raise invalid(
        f"The decoder prompt (length {tokens}) plus the number of requested output tokens (at least 1) is "
        f"longer than the maximum model length of {tokens}. Make sure that `max_model_len` is no smaller "
        "than the number of text tokens (prompt + requested output tokens)."
    )


def refuse_long_output(param: str, max_tokens: int, max_model_len: int) -> NoReturn:
    """Refuse an output limit that exceeds the context limit by itself."""
    raise invalid(
        f"{param}={max_tokens} cannot be greater than max_model_len={max_model_len}. Please request fewer "
        "output tokens.",
        param=param,
        value=max_tokens,
    )
