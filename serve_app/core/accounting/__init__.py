"""Accounting: readers of events and commands that explain waits, attribute costs and predict starts."""
