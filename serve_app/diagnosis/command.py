"""The command `python -m serve_app doctor`: what is wrong with a running application, the worst first."""

import argparse

from serve_app.command import Command, say
from serve_app.diagnosis.diagnose import diagnose
from serve_app.errors import SettingsError
from serve_app.launch.instance import running_instances
from serve_app.status import add_address, api_key_for, default_url

_LABELS = ("DOWN", "degraded", "risk", "note")


def _configure(parser: argparse.ArgumentParser) -> None:
    add_address(parser)


def _run(args: argparse.Namespace) -> int:
    url = (args.url or default_url()).rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"{url!r} is not an address: begin it with http:// or https://")
    troubles = diagnose(url, api_key_for(url, args.api_key), list(running_instances()))
    if not troubles:
        say(f"{url}: nothing found")
        return 0
    for number, trouble in enumerate(troubles, 1):
        say(f"{number}. {_LABELS[trouble.severity]}: {trouble.what}\n   next: {trouble.next_step}")
    return 1


COMMAND = Command(
    name="doctor",
    summary="say what is wrong with a running application, the worst first, each with the next step",
    example="example:\n  python -m serve_app doctor --url http://127.0.0.1:8000",
    configure=_configure,
    run=_run,
)
