"""Models that are written for tests: no model hub has them."""
