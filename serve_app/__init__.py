"""The scheduling layer between LLM applications and vLLM fleets.

Reading order: `request` and `errors` (shared types), `scheduling` and `routing` (the pure core), `engines`
(what runs behind a pool) with `engine_model`, `serving` (the processes in Ray Serve), `settings` and `app`
(composition), `simulation`, `tuning`, `planning`, `calibration` and `bench` (work around the application),
`cli`.
"""

__version__ = "0.1.0"
