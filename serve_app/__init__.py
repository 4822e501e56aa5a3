"""The scheduling layer between LLM applications and vLLM fleets.

Reading order: `request` and `errors` (shared types), `core` (the pure decision), `engines` (what runs behind
a pool, and its model), `serving` (the processes in Ray Serve), `settings` and `app` (composition), `lab`
(simulation, planning, calibration, load tests, reports), `tuning`, `cli` (a file or folder for each command).
"""

__version__ = "0.1.0"
