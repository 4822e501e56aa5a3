"""Cost of the application per request."""
