"""Which length queues Refine-and-Prune finds."""
