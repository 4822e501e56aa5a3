"""The scheduling layer between LLM applications and vLLM fleets.

Reading order: `request` and `errors` (the words), `scheduling` (the pure core), `routing` (token budgets
and pools), `engines` (what runs behind a pool), `serving` (the Ray Serve shells), `app` (composition).
"""

__version__ = "0.1.0"
