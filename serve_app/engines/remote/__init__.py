"""OpenAI-compatible servers that run elsewhere. `engine` watches their load, `proxy` forwards requests."""
