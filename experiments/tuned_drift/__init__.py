"""Simulated production whose traffic changes half-way, with and without a tuner."""
