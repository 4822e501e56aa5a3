"""Models and adapters whose weights are written by tests."""
