"""Experiments: measurements with their settings, and how to repeat them. Read `README.md` first."""
