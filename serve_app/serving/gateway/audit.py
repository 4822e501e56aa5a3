"""The audit log: one line for each change by an admin."""

import logging

from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.incoming import IncomingRequest

logger = logging.getLogger("ray.serve")


def audit(action: str, caller: Caller, incoming: IncomingRequest, **details: object) -> None:
    """Log a change by an admin: what, by which key, from where."""
    by = "application" if caller.key is None else caller.key.id
    text = "".join(f" {name}={value!r}" for name, value in details.items())
    logger.info("event=audit action=%s by=%s client=%s%s", action, by, incoming.client or "-", text)
