"""Gateways: more than one, and one with ten thousand waiting streams."""
