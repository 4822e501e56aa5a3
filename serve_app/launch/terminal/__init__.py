"""The terminal of `serve`: steps and the way in (`console.py`), then one line (`live_view.py`)."""
