"""The file that `init` writes: what stands around the models, and the models by what there is."""

import textwrap
from dataclasses import dataclass

from serve_app.first_config.fleet import Emulated, Fleet, Gpus
from serve_app.first_config.gpus import gpu_models
from serve_app.first_config.packaged import PACKAGED_CONFIG
from serve_app.first_config.remote import remote_models
from serve_app.first_config.yaml_text import scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the application is to listen, and how it is started.

    Attributes:
        start: the command that starts it.
    """

    host: str
    port: int
    start: str


def configuration(fleet: Fleet, place: Place) -> str:
    """The whole file.

    Raises:
        SettingsError: what there is does not make an application.
    """
    if isinstance(fleet, Emulated):
        return _emulated(place)
    title, models = (
        (f"vLLM engines of {fleet.name}: {fleet.engines}, on {fleet.per_engine} GPU each.", gpu_models(fleet))
        if isinstance(fleet, Gpus)
        else ("In front of servers that run already; nothing of theirs changes.", remote_models(fleet))
    )
    return _FRAME.format(
        title=title,
        start=place.start,
        host=scalar(place.host),
        port=place.port,
        models=textwrap.indent(models, " " * 8),
    )


def _emulated(place: Place) -> str:
    text = PACKAGED_CONFIG.read_text(encoding="utf-8")
    started = next(line for line in text.splitlines() if line.startswith("#   scripts/serve"))
    for old, new in (
        (started, f"#   {place.start}"),
        ("host: 127.0.0.1", f"host: {scalar(place.host)}"),
        ("port: 8000", f"port: {place.port}"),
    ):
        text = text.replace(old, new, 1)
    return text


_FRAME = """\
# {title}
#   {start}
proxy_location: HeadOnly
http_options:
  # 127.0.0.1: only programs on this machine; 0.0.0.0 lets in everyone who reaches it, so set keys then:
  # gateway: {{keys: [{{tenant: app, env: EWSJF_API_KEY_APP}}]}} beside `models`.
  host: {host}
  port: {port}
logging_config:
  # One line per request is written by the gateway itself, with what happened to it.
  enable_access_log: false
applications:
  - name: ewsjf
    route_prefix: /
    import_path: serve_app.app:build_app
    args:
      models:
{models}      # What schedulers learn, kept for the next start; without it every start learns anew.
      # state_uri: /var/lib/ewsjf
      # A gateway carries some thousand requests/s. Shares of a core are only counted, and limit nothing.
      gateways: {{replicas: 1, num_cpus: 0.2}}
"""
