"""Two late users behind a flood, live."""
