"""Policies whose assumptions fail, simulated."""
