"""The file that `init` writes: what stands around the models, and the models by what there is."""

import textwrap
from dataclasses import dataclass

from serve_app.access import is_loopback
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
        insecure: whether it needs no keys, even where others than this machine reach it.
    """

    host: str
    port: int
    start: str
    insecure: bool = False


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
    ) + _gateway(place)


def _gateway(place: Place) -> str:
    """The keys without which others than this machine are not to be let in."""
    if is_loopback(place.host):
        return ""
    return textwrap.indent(_INSECURE if place.insecure else _KEYS, " " * 6)


def _emulated(place: Place) -> str:
    text = PACKAGED_CONFIG.read_text(encoding="utf-8") + _gateway(place)
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
# The gateway listens itself. With EveryNode, HAProxy stands in front: for gateways on several machines.
proxy_location: Disabled
http_options:
  # 127.0.0.1: only programs on this machine. Others, such as 0.0.0.0, ask for keys beside `models`:
  # gateway: {{keys: [{{tenant: app, env: EWSJF_API_KEY_APP}}]}}
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

_KEYS = """\
gateway:
  # The secret is in this environment variable of `serve`. More keys: a tenant, and perhaps classes, for each.
  keys: [{tenant: app, env: EWSJF_API_KEY_APP, may_act_for_tenants: true}]
"""
_INSECURE = """\
gateway:
  # Everybody who reaches the address is let in: something in front has to ask for keys.
  insecure: true
"""
