"""The scheduling core: events in, commands out, without a clock.

Read `events`, `commands`, then `scheduler` (one event at a time), `admission` (which requests may queue),
`queueing` (sub-queues, and fair shares of tenants), `policies` (the order of the heads) and `dispatch` (the
next request and its replica). `isolation` limits long prefills. The ledger and the token estimates are in
`serve_app.core.routing`.
"""

from serve_app.core.scheduler import Scheduler as Scheduler
from serve_app.core.settings import SchedulerSettings as SchedulerSettings
