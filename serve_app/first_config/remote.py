"""The pools in front of servers that run already."""

from collections.abc import Iterator

from serve_app.errors import SettingsError
from serve_app.first_config.fleet import SHORT_CONTEXT, Server, Servers
from serve_app.first_config.yaml_text import flow, scalar

_MOST_POOLS = 2


def remote_models(servers: Servers) -> str:
    """The list `models`: servers of a model with the same context are a pool, the shorter context first.

    Raises:
        SettingsError: the servers of a model have more contexts than it can have pools.
    """
    of_model: dict[str, list[Server]] = {}
    for server in servers.found:
        of_model.setdefault(server.models[0], []).append(server)
    return "".join(_model(name, found, servers) for name, found in of_model.items())


def _model(name: str, found: list[Server], servers: Servers) -> str:
    contexts = sorted({server.max_model_len for server in found})
    if len(contexts) > _MOST_POOLS:
        raise SettingsError(
            f"the servers of the model {name} have {len(contexts)} contexts ({', '.join(map(str, contexts))} "
            f"tokens): a pool has one, and a model has at most {_MOST_POOLS} pools, so name servers of "
            f"{_MOST_POOLS} contexts"
        )
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
    names = ("short", "long") if len(pools) == _MOST_POOLS else ("all",)
    if len(pools) == _MOST_POOLS:
        yield _SHORTER_FIRST
    for pool, (context, found) in zip(names, pools.items(), strict=True):
        yield _pool(pool, context, found, servers)
    if len(pools) == _MOST_POOLS:
        yield (
            "  scheduler:\n"
            "    routing:\n"
            "      # Prompt and answer together. Above it a request is at home in the long pool.\n"
            f"      b_short_tokens: {min(SHORT_CONTEXT, *pools)}\n"
        )


def _pool(name: str, context: int, found: list[Server], servers: Servers) -> str:
    key = f"          api_key_env: {scalar(servers.api_key_env)}\n" if servers.api_key_env else ""
    if servers.max_num_seqs is not None:
        key += f"          max_num_seqs: {servers.max_num_seqs}\n"
    urls = "".join(f"            - {scalar(server.url)}\n" for server in found)
    return _POOL.format(name=name, urls=urls, key=key, context=context)


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
