"""What is wrong with the values in a settings file, in the file's own words: full path, value, remedy."""

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from serve_app.settings.tree import path_of
from serve_app.settings_base import OutOfRangeError


def explained(failure: ValidationError, root: type) -> list[str]:
    """All that pydantic found, one line each; `root` is the class at the top of the file."""
    return [_explained(error, root) for error in failure.errors()]


def _explained(error: ErrorDetails, root: type) -> str:
    if error["type"] == "value_error":
        return _refused(error, root)
    where = path_of(error["loc"], root) or "args"
    if error["type"].startswith("missing"):
        return f"{where}: is missing"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _refused(error: ErrorDetails, root: type) -> str:
    """What a class of settings said of its values."""
    reason = error["ctx"]["error"]
    if isinstance(reason, OutOfRangeError):
        return f"{path_of((*error['loc'], reason.name), root)} {reason.reason}"
    where = path_of(error["loc"], root)
    return f"{where}: {reason}" if where else str(reason)
