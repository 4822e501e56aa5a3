"""vLLM's own OpenAI server inside a pool replica. `engine` is the only module that imports vllm."""
