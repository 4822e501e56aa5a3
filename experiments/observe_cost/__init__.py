"""The cost of observing, and what the twin told of scheduling before it began."""
