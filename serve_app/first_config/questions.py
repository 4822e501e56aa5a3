"""Asks a person on a terminal what there is."""

import shlex

from rich.console import Console
from rich.prompt import IntPrompt, Prompt

from serve_app.checking.machine import gpu_names, only_card
from serve_app.first_config.fleet import DEFAULT_CONTEXT, Emulated, Fleet, Gpus, Servers, stated_context
from serve_app.first_config.servers import ask_servers


def ask_fleet(console: Console) -> Fleet:
    """What is to answer requests.

    Raises:
        ServeAppError: a server does not answer, or answers do not go together.
    """
    found = gpu_names()
    console.print(f"GPUs on this machine: {', '.join(found) or 'none'}")
    kind = Prompt.ask(
        "What answers requests? (emulated: engines without a GPU or a model, to try it; gpus: vLLM on GPUs "
        "of this machine; servers: vLLM servers that run already)",
        choices=["emulated", "gpus", "servers"],
        default="gpus" if found else "emulated",
        console=console,
    )
    if kind == "gpus":
        return _gpus(console, len(found))
    if kind == "servers":
        return _servers(console)
    return Emulated()


def ask_port(console: Console, default: int) -> int:
    """The port to listen on."""
    return IntPrompt.ask("Port to listen on", default=default, console=console)


def _gpus(console: Console, found: int) -> Gpus:
    count = IntPrompt.ask("How many GPUs may be used", default=found or 1, console=console)
    model = ""
    while not model:
        model = Prompt.ask("Model (a name on the model hub, or a folder)", default="", console=console)
    per_engine = IntPrompt.ask("GPUs of one engine (tensor parallelism)", default=1, console=console)
    context = IntPrompt.ask(
        "Longest context in tokens", default=stated_context(model) or DEFAULT_CONTEXT, console=console
    )
    return Gpus(count=count, model=model, max_model_len=context, per_engine=per_engine, card=only_card())


def _servers(console: Console) -> Servers:
    urls: list[str] = []
    while not urls:
        urls = shlex.split(
            Prompt.ask("Addresses of the servers, with blanks between them", default="", console=console)
        )
    env = Prompt.ask("Environment variable with their key (empty: none)", default="", console=console) or None
    found = ask_servers(urls, env)
    return Servers(found=found, api_key_env=env)
