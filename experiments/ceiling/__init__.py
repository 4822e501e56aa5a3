"""How many requests per second one scheduler can do, and what breaks first beyond that."""
