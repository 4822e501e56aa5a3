"""The error of experiments."""

from serve_app.errors import ServeAppError


class ExperimentError(ServeAppError):
    """An experiment cannot run, or its measurement is invalid; the message has the reason and the remedy."""
