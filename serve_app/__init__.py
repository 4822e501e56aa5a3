"""A scheduling layer between LLM applications and vLLM fleets.

In reading order:

- `request`, `errors`: the types that all packages share: requests, outcomes and exceptions.
- `core`: the pure scheduling core.
- `engines`: the engines of pools, their performance model, and adapters for servers elsewhere.
- `serving`: the processes in Ray Serve.
- `settings`, `app`: from a settings file to the deployments of an application.
- `lab`: simulation, planning and calibration.
- `tuning`: learns length queues, and searches better values of settings.
- `cli`: the commands, a file or folder for each; `__main__` runs it.
"""

__version__ = "0.4.0"
