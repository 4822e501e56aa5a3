"""The scheduling core: events in, commands out, without a clock of its own.

Read `events`, `commands`, then `scheduler` (one event at a time), `admission` (which requests may wait),
`queueing` (where they wait, and how tenants share), `policies` (the order of the heads) and `dispatch` (which
request is sent where). `isolation` limits long prefills. The ledger and the token estimates are in
`serve_app.core.routing`.
"""

from serve_app.core.scheduler import Scheduler as Scheduler
from serve_app.core.settings import SchedulerSettings as SchedulerSettings
