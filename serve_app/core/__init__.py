"""The scheduling core: events in, commands out, without a clock.

In reading order:

- `events`, `commands`, `request`: what the core receives and returns, and a request inside it.
- `scheduler`: handles one event at a time.
- `admission`: which requests may queue; `latency_targets`: what a target changes there, and in order and
  placement.
- `queueing`: the sub-queues, and fair shares of tenants; `policies`: the order of their heads.
- `routing`: token estimates, the pools of a request, and the ledger of replicas.
- `dispatch`: the next request and its replica; `isolation` limits long prefills.
- `programs`: agent programs, whose contexts stay in the KV caches.
- `scaling`: the number of replicas of each pool.
- `accounting`, `outlook`, `metrics`: causes of waits and costs, expected starts, and figures of requests.
- `settings`, `retuning`, `settings_base`: all settings, those that may change at run time, and their reader.
- `learned_state`, `decision_log`: state for the next scheduler, and events with their commands for a replay.
"""

from serve_app.core.scheduler import Scheduler as Scheduler
from serve_app.core.settings import SchedulerSettings as SchedulerSettings
