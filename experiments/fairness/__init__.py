"""Tenants, classes and engine queues in overload."""
