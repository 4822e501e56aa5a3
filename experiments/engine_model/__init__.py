"""Experiment: the engine model compared with vLLM's own scheduler."""
