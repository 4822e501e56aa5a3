"""Experiments: what was measured, with which settings, and how to repeat it. Read `README.md` first."""
