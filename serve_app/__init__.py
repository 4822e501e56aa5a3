"""A scheduling layer between LLM applications and vLLM fleets.

Reading order: `request` and `errors` (shared types), `core` (the pure scheduling core), `engines` (the
engines of pools, and their performance model), `serving` (the processes in Ray Serve), `settings` and `app`
(composition), `lab` (simulation, planning, calibration, load tests, reports), `tuning`, `cli` (a file or
folder for each command).
"""

__version__ = "0.4.0"
