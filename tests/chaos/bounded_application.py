"""Application whose bounds on memory are so low that a test of half a minute reaches all of them."""

from collections.abc import Mapping
from typing import Any

from ray.serve import Application

import serve_app.app
from serve_app.core.admission import admission, key_limits
from serve_app.core.dispatch import backfill
from serve_app.core.programs import program
from serve_app.core.queueing import fairness
from serve_app.core.routing import prefix
from serve_app.core.routing.estimation import output_length
from serve_app.serving import process
from serve_app.serving.gateway.deployment import GatewayDeployment
from serve_app.serving.scheduler import gauges, journal, usage
from serve_app.serving.scheduler import journal as recent_activity
from serve_app.serving.scheduler.actor import SchedulerDeployment


class BoundedScheduler(SchedulerDeployment):
    """Deployment whose replicas import this module, and so the bounds below."""


class BoundedGateway(GatewayDeployment):
    """Likewise."""


program._MOST_CONVERSATIONS = 300
prefix._MAX_BLOCKS = 2_000
fairness._MAX_IDLE = 200
key_limits._MAX_ACCOUNTS = 10
admission._MAX_RESERVATIONS = 50
output_length._MAX_TENANTS = 100
backfill._ACTIVE_S = 5.0
journal.RETENTION_S = 5.0
gauges._MAX_TENANTS = 50
recent_activity._MAX_TENANTS = 5
recent_activity.SLOTS = 2
usage._MAX_LABELS = 10
# Garbage and freed memory would hide growth for minutes.
process._YOUNG_OBJECTS, process._OLDER_PER_YOUNG, process._OLDEST_PER_OLDER = 700, 10, 10
process._KEPT_BYTES = process._LONGEST_KEPT_BYTES = 128 * 1024


def build_app(args: Mapping[str, Any]) -> Application:
    """Build the application with these bounds."""
    vars(serve_app.app).update(SchedulerDeployment=BoundedScheduler, GatewayDeployment=BoundedGateway)
    return serve_app.app.build_app(args)
