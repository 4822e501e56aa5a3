"""Responses that the emulated engine keeps in its memory, as vLLM does with its store switched on.

Read `store`, then `responses`, which answers the endpoints.
"""
