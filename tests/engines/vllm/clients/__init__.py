"""Client compatibility through a gateway with a real engine: one check per cell of docs/clients.md.

`harness.py` has the gateway and the requests; each other file has the checks of one client.
"""

from tests.engines.vllm.clients import anthropic_python, javascript, langchain, openai_python, vllm_bench
from tests.engines.vllm.clients.harness import Checks, client_harness

__all__ = ["CHECKS", "WITH_TOOLS", "client_harness"]

# Client and feature, named as in the documentation's table.
CHECKS: Checks = {
    **openai_python.CHECKS,
    **anthropic_python.CHECKS,
    **langchain.CHECKS,
    **javascript.CHECKS,
    **vllm_bench.CHECKS,
}
# Features that need an engine with a tool parser and a model that writes calls.
WITH_TOOLS = frozenset({"tools", "streamed tools"})
