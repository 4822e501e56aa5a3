"""Gateways in front of vLLM servers whose executor computes nothing."""
