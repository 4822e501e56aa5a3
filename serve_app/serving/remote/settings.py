"""Settings of a pool of endpoints."""

import os
from dataclasses import field
from typing import Annotated

from serve_app.core.settings_base import ADVANCED, INTERNAL, POSITIVE, at_least, settings
from serve_app.errors import EngineError
from serve_app.serving.remote.sources import source_of


@settings
class RemoteSettings:
    """Remote engines: their discovery, and limits that they do not report.

    Attributes:
        endpoints: URLs of servers, or sources of URLs: `dns+http://name:8000`, `srv+http://_vllm._tcp.name`,
            `kubernetes+http://service.namespace:8000`, `inferencepool+http://name.namespace`,
            `file:///path`. May be empty if an admin adds endpoints at run time.
        api_key: bearer token for each server.
        api_key_env: environment variable of the watcher that holds the key, to avoid a key in the file.
        served_model_names: model names that each server must have; empty disables the check.
        max_model_len: context limit in tokens, for servers that do not report it.
        kv_tokens: KV cache of each server in tokens, likewise.
        max_num_seqs: maximum sequences in the batch of each server, likewise.
        start_timeout_s: time to wait at the start for the first endpoint to answer.
    """

    endpoints: tuple[str, ...] = ()
    api_key: Annotated[str | None, ADVANCED] = field(default=None, repr=False)
    api_key_env: str | None = None
    served_model_names: Annotated[tuple[str, ...] | None, ADVANCED] = None
    max_model_len: Annotated[
        int | None, at_least(1).hint("omit to use the limit that the server reports")
    ] = None
    kv_tokens: Annotated[
        int | None, at_least(1).hint("omit to use the limit that the server reports"), ADVANCED
    ] = None
    max_num_seqs: Annotated[
        int | None, at_least(1).hint("omit to use the limit that the server reports"), ADVANCED
    ] = None
    start_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 60.0
    # Time limit for reading metrics; an endpoint that exceeds it receives no requests until it answers again.
    # Must allow for an engine that is busy with a long prompt.
    metrics_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 2.0
    # An endpoint with requests but without progress for this long receives no more until it progresses.
    hang_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 60.0
    # Interval of resolving names and reading files. Kubernetes pushes changes.
    refresh_s: Annotated[float, POSITIVE, ADVANCED] = 5.0

    def __post_init__(self) -> None:
        for text in self.endpoints:
            source_of(text)
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("give api_key or api_key_env, not both")

    @property
    def context_limit(self) -> int | None:
        """Context limit in tokens; None if the servers report it."""
        return self.max_model_len

    @property
    def schedules_by_priority(self) -> bool | None:
        """None: only the servers know."""
        return None

    def key(self) -> str:
        """Return the key for endpoints; empty for none.

        Raises:
            EngineError: the environment variable is not set.
        """
        if self.api_key_env is None:
            return self.api_key or ""
        if key := os.environ.get(self.api_key_env):
            return key
        raise EngineError(
            f"the environment variable {self.api_key_env} is not set: set it where this runs, or change "
            "api_key_env"
        )
