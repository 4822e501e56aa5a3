"""The pools in front of servers that run already."""

from collections.abc import Iterator

from serve_app.errors import SettingsError
from serve_app.first_config.fleet import SHORT_CONTEXT, Server, Servers
from serve_app.first_config.yaml_text import flow, scalar

_MOST_POOLS = 2


def remote_models(servers: Servers) -> str:
    """The list `models`: servers of the same model are its pools, the shorter context first.

    Raises:
        SettingsError: more servers have a model than it can have pools.
    """
    of_model: dict[str, list[Server]] = {}
    for server in servers.found:
        of_model.setdefault(server.models[0], []).append(server)
    return "".join(_model(name, found, servers) for name, found in of_model.items())


def _model(name: str, found: list[Server], servers: Servers) -> str:
    if len(found) > _MOST_POOLS:
        raise SettingsError(
            f"{len(found)} servers have the model {name}: a pool stands for one server and a model has at "
            f"most {_MOST_POOLS} pools, so name {_MOST_POOLS} of them"
        )
    pools = sorted(found, key=lambda server: server.max_model_len)
    common = set.intersection(*(set(server.models) for server in pools))
    aliases = tuple(alias for alias in pools[0].models if alias in common - {name})
    return "".join(_lines(name, aliases, pools, servers))


def _lines(name: str, aliases: tuple[str, ...], pools: list[Server], servers: Servers) -> Iterator[str]:
    yield "# The name under which the servers have it: bodies are passed on as they come.\n"
    yield f"- name: {scalar(name)}\n"
    if aliases:
        yield f"  aliases: {flow(aliases)}\n"
    yield "  pools:\n"
    names = ("short", "long") if len(pools) == _MOST_POOLS else ("all",)
    same = len({server.max_model_len for server in pools}) == 1
    if len(pools) == _MOST_POOLS:
        yield _SAME if same else _SHORTER_FIRST
    for pool, server in zip(names, pools, strict=True):
        yield _pool(pool, server, servers)
    if len(pools) == _MOST_POOLS:
        budget = min(SHORT_CONTEXT, pools[0].max_model_len // (2 if same else 1))
        yield (
            "  scheduler:\n"
            "    routing:\n"
            "      # Prompt and answer together. Above it a request is at home in the long pool.\n"
            f"      b_short_tokens: {budget}\n"
        )


def _pool(name: str, server: Server, servers: Servers) -> str:
    key = f"          api_key_env: {scalar(servers.api_key_env)}\n" if servers.api_key_env else ""
    return _POOL.format(
        name=name,
        url=scalar(server.url),
        key=key,
        context=server.max_model_len,
        max_num_seqs=servers.max_num_seqs,
    )


_SAME = """\
    # Both have the same context: each takes over where the other is full.
"""

_SHORTER_FIRST = """\
    # The pool with the shorter context comes first: its requests never wait behind a long prefill.
"""

_POOL = """\
    - name: {name}
      engine:
        remote:
          base_url: {url}
{key}          # Context (now {context:,} tokens) and KV cache are read from the server; this it does not
          # state (`--max-num-seqs`). Too high a value lets requests wait inside the server, out of order.
          max_num_seqs: {max_num_seqs}
      # One replica per server; it only passes bytes on.
      replicas: 1
      resources: {{num_cpus: 0.1}}
"""
