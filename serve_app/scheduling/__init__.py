"""The scheduling core: events in, commands out, no clock of its own.

Read `events`, `commands`, then `scheduler` (the decision), `waiting_room` (where requests wait),
`backpressure` (what an engine may be sent) and `policies` (who goes first). The ledger and the token
estimates are in `serve_app.routing`.
"""

from serve_app.scheduling.scheduler import Scheduler as Scheduler
from serve_app.scheduling.settings import SchedulerSettings as SchedulerSettings
