"""Settings of a pool of endpoints."""

import os
from dataclasses import field
from typing import Annotated

from serve_app.core.settings_base import ADVANCED, INTERNAL, POSITIVE, at_least, settings
from serve_app.errors import EngineError
from serve_app.serving.remote.sources import source_of


@settings
class RemoteSettings:
    """Engines that run elsewhere: where they are found, and what they do not state by themselves.

    Attributes:
        endpoints: URLs of servers, and places where URLs are found: `dns+http://name:8000`,
            `srv+http://_vllm._tcp.name`, `kubernetes+http://service.namespace:8000`, `file:///path`. None are
            needed where an admin adds them while it runs.
        api_key: sent to each as a bearer token.
        api_key_env: environment variable of the watcher that holds the key, so that no file has to.
        served_model_names: names that each must serve; empty checks none.
        max_model_len: their context limit in tokens, where they do not state it.
        kv_tokens: KV cache of each in tokens, likewise.
        max_num_seqs: most sequences in the batch of each, likewise.
        start_timeout_s: how long a start waits for the first of them to answer.
    """

    endpoints: tuple[str, ...] = ()
    api_key: Annotated[str | None, ADVANCED] = field(default=None, repr=False)
    api_key_env: str | None = None
    served_model_names: Annotated[tuple[str, ...] | None, ADVANCED] = None
    max_model_len: Annotated[int | None, at_least(1).hint("leave it out to ask the server")] = None
    kv_tokens: Annotated[int | None, at_least(1).hint("leave it out to ask the server"), ADVANCED] = None
    max_num_seqs: Annotated[int | None, at_least(1).hint("leave it out to ask the server"), ADVANCED] = None
    start_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 60.0
    # An endpoint whose metrics take longer gets no requests until they come again. Long enough for one that
    # is busy with a long prompt.
    metrics_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 2.0
    # An endpoint with requests whose metrics show no progress for so long gets no more until they do.
    stall_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 60.0
    # Names are resolved, and files read, this often. Kubernetes tells of changes by itself.
    refresh_s: Annotated[float, POSITIVE, ADVANCED] = 5.0

    def __post_init__(self) -> None:
        for text in self.endpoints:
            source_of(text)
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("give api_key or api_key_env, not both")

    def key(self) -> str:
        """The key for endpoints; empty for none.

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
