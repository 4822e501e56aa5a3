"""Cost of a live search for the application beside it."""
