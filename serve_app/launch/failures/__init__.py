"""A start that fails or takes long: the logs of its engines (`engine_logs.py`), the reason (`reason.py`)."""
