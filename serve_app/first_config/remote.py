"""The pools in front of servers that run already."""

from collections.abc import Iterator

from serve_app.first_config.fleet import SHORT_CONTEXT, Server, Servers
from serve_app.first_config.yaml_text import flow, scalar


def remote_models(servers: Servers) -> str:
    """The list `models`: servers of a model with the same context are a pool, the shorter context first."""
    of_model: dict[str, list[Server]] = {}
    for server in servers.found:
        of_model.setdefault(server.models[0], []).append(server)
    return "".join(_model(name, found, servers) for name, found in of_model.items())


def _model(name: str, found: list[Server], servers: Servers) -> str:
    contexts = sorted({server.max_model_len for server in found})
    pools = {each: [server for server in found if server.max_model_len == each] for each in contexts}
    common = set.intersection(*(set(server.models) for server in found))
    aliases = tuple(alias for alias in found[0].models if alias in common - {name})
    return "".join(_lines(name, aliases, pools, servers))


def _lines(
    name: str, aliases: tuple[str, ...], pools: dict[int, list[Server]], servers: Servers
) -> Iterator[str]:
    yield "# The name under which the servers have it: bodies are passed on as they come.\n"
    yield f"- name: {scalar(name)}\n"
    if aliases:
        yield f"  aliases: {flow(aliases)}\n"
    yield "  pools:\n"
    names = _NAMES.get(len(pools)) or tuple(f"up-to-{context}" for context in pools)
    if len(pools) > 1:
        yield _SHORTER_FIRST
    for pool, (context, found) in zip(names, pools.items(), strict=True):
        yield _pool(pool, context, found, servers)
    if len(pools) > 1:
        # More pools than two have their contexts as boundaries; the first one's is not in the settings.
        boundary = min(SHORT_CONTEXT, *pools) if len(pools) == len(_NAMES) else min(pools)
        yield (
            "  scheduler:\n"
            "    routing:\n"
            f"      # Prompt and answer together. Above it no request is at home in the pool {names[0]}.\n"
            f"      b_short_tokens: {boundary}\n"
        )


def _pool(name: str, context: int, found: list[Server], servers: Servers) -> str:
    key = f"          api_key_env: {scalar(servers.api_key_env)}\n" if servers.api_key_env else ""
    if servers.max_num_seqs is not None:
        key += f"          max_num_seqs: {servers.max_num_seqs}\n"
    urls = "".join(f"            - {scalar(server.url)}\n" for server in found)
    return _POOL.format(name=name, urls=urls, key=key, context=context)


_NAMES = {1: ("all",), 2: ("short", "long")}

_SHORTER_FIRST = """\
    # The pool with the shorter context comes first: its requests never wait behind a long prefill.
"""

_POOL = """\
    - name: {name}
      engine:
        remote:
          # Each is asked for its limits (context now: {context:,} tokens). More may be added here, found by
          # DNS, in a file or by Kubernetes, or added while it runs: see docs/put-in-front.md.
          endpoints:
{urls}{key}"""
