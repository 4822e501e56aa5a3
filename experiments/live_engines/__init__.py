"""Policies side by side on real vLLM engines."""
