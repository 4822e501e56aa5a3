"""Client of the running application that the options `--url` and `--api-key` select."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from serve_app.cli.http_client import ConnectionFailedError, HttpResponse, download, request
from serve_app.cli.serve.instance import instance_at, running_instances
from serve_app.errors import ServeAppError
from serve_app.serving.access import ADMIN_KEY_VARIABLE, read_admin_key

Document = Mapping[str, Any]

_LOCAL_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "EWSJF_API_KEY"


KEY_ADVICE = (
    f"--api-key or {_KEY_VARIABLE}. `ewsjf serve` creates one. An application that Ray Serve starts has one "
    f"if {ADMIN_KEY_VARIABLE} is set for Ray, or a key in gateway.keys has admin: true"
)
"""Where an admin key comes from, as the end of a sentence."""


class ApplicationError(ServeAppError):
    """The application rejects a request, or its answer is invalid."""


class UnreachableError(ApplicationError):
    """The application does not answer at the address."""


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the options that `ApplicationClient` reads."""
    parser.add_argument(
        "--url",
        help="URL of the application (default: the one that "
        f"`serve` runs on this machine, else {_LOCAL_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(_KEY_VARIABLE),
        help="API key; all commands but `batch` need one of an admin "
        f"(default: {_KEY_VARIABLE}, else the admin key that `serve` created on this machine)",
    )


class ApplicationClient:
    """Client of one application.

    Attributes:
        url: address without `/v1`.
        api_key: the given key, or the one that `serve` created if the application runs on this machine.

    Raises:
        ApplicationError: several applications run here, and no address is given.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        running = list(running_instances())
        if not args.url and len(running) > 1:
            known = ", ".join(f"{each.url} ({each.config})" for each in running)
            raise ApplicationError(f"several applications run here, choose one with --url: {known}")
        self._is_given = bool(args.url)
        chosen = args.url or (running[0].url if running else _LOCAL_URL)
        self.url = chosen.rstrip("/").removesuffix("/v1")
        own = instance_at(self.url, running)
        self.api_key = args.api_key or (None if own is None else read_admin_key(Path(own.folder)))

    def response(self, path: str, **options: Any) -> HttpResponse:
        """Return a successful response; `options` are those of `request`.

        Raises:
            UnreachableError: the application does not answer.
            ApplicationError: it rejects the request.
        """
        try:
            answer = request(self.url + path, self.api_key, **options)
        except ConnectionFailedError as error:
            hint = "; this is the default address: start the application there, or pass --url"
            raise UnreachableError(
                f"{self.url} does not respond: {error}{'' if self._is_given else hint}"
            ) from error
        return self._checked(path, answer)

    def document(self, path: str, *fields: str, **options: Any) -> Document:
        """Return the JSON object of a successful response; raise as `response`, or if it lacks a field."""
        found = self.response(path, **options).document()
        if found is None:
            raise ApplicationError(f"{self.url}{path} did not return JSON: is it a gateway of this project?")
        if missing := [name for name in fields if name not in found]:
            raise ApplicationError(
                f"{self.url}{path} is not a gateway of this project: its response has no {missing[0]}"
            )
        return found

    def models(self, path: str, **options: Any) -> Sequence[Document]:
        """Return the models of a document, otherwise as `document`."""
        found = self.document(path, "models", **options)["models"]
        if not isinstance(found, list) or not all("model" in each for each in found):
            raise ApplicationError(
                f"{self.url}{path} is not a gateway of this project: its response has no list of models"
            )
        return found

    def save(self, path: str, out: IO[bytes], timeout_s: float) -> None:
        """Write the body of a successful response to a file."""
        self._checked(path, download(self.url + path, self.api_key, out, timeout_s))

    def _checked(self, path: str, answer: HttpResponse) -> HttpResponse:
        """Return a successful response; raise `ApplicationError` with the message of any other."""
        if answer.is_success:
            return answer
        if answer.is_denied:
            raise ApplicationError(f"{self.url}{path} returned {answer}: pass an admin key with {KEY_ADVICE}")
        error = (answer.document() or {}).get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise ApplicationError(str(message or f"{self.url}{path} returned {answer}"))
