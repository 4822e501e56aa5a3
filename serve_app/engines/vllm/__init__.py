"""vLLM's own OpenAI server inside a pool replica.

`engine` implements the engine, `args` converts settings to vLLM's arguments, `load_meter` measures the load,
and `library` is the only module that imports vLLM.
"""
