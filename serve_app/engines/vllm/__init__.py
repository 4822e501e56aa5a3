"""vLLM's own OpenAI server inside a pool replica.

`engine` implements the engine, converts settings to vLLM's arguments and measures the load, and `library` is
the only module that imports vLLM.
"""
