"""Settings of the Batch API."""

import os
from pathlib import Path
from typing import Annotated

from serve_app.core.settings_base import ADVANCED, INTERNAL, at_least, settings
from serve_app.errors import SettingsError

_GIBIBYTE = 1024**3


@settings(block="batches")
class BatchSettings:
    """The Batch API: `/v1/files` and `/v1/batches`.

    Attributes:
        folder: absolute path of the folder with the database and the files. All nodes need the same one, for
            example on a shared file system. By default each application has one in the state folder of its
            user, `~/.local/state/ewsjf`, which suits a single node.
    """

    folder: str | None = None
    # Folder of the files' contents, if it is not `files` in `folder`: a path, or a URI that fsspec supports
    # (`s3://bucket/folder`).
    files_uri: Annotated[str | None, ADVANCED] = None
    # Most bytes of all files of one tenant. Uploads beyond them are rejected. Results of batches are always
    # written, and count.
    max_stored_bytes: Annotated[int, at_least(1_024), ADVANCED] = 100 * _GIBIBYTE
    # Most files of one tenant, counted in the same way.
    max_files: Annotated[int, at_least(1), ADVANCED] = 10_000
    # Most batches of one tenant that have not ended. At most 64 of all tenants run at a time.
    max_open_batches: Annotated[int, at_least(1), ADVANCED] = 100
    # Time after which a file is deleted, unless its client states another, and a batch after the end of its
    # window. A longer time needs a larger disk.
    retention_s: Annotated[int, at_least(3_600), ADVANCED] = 30 * 24 * 3600
    # Longest input file, and most requests in it. OpenAI's limits are 200 MB and 50,000.
    max_file_bytes: Annotated[int, at_least(1_024), INTERNAL] = 2 * _GIBIBYTE
    max_requests: Annotated[int, at_least(1), INTERNAL] = 100_000

    def __post_init__(self) -> None:
        if self.folder is not None and not Path(self.folder).is_absolute():
            raise SettingsError(
                f"gateway.batches.folder must be an absolute path, got {self.folder!r}: each gateway has its "
                "own working directory"
            )


def default_folder(application: str, port: int) -> Path:
    """Return the folder of an application for which none is configured."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "ewsjf" / "batches" / f"{application}-{port}"
