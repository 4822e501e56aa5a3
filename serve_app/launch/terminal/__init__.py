"""The terminal of `serve`: steps and the way in (`console.py`), then two lines (`live_view.py`)."""
