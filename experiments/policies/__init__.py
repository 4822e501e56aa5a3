"""Policies side by side, simulated."""
