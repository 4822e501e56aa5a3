"""Shared machinery and experiments: rows, tables, and that what is played stays what it was."""
