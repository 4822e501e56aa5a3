"""vLLM's own OpenAI server inside a pool replica.

`engine` is the engine, `args` turns settings into vLLM's arguments, and `library` is the only module that
imports vLLM.
"""
