"""OpenAI-compatible servers that run elsewhere: `engine` reads their load, `proxy` forwards requests."""
