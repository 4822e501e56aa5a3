"""Which length queues are best for scheduling, simulated."""
