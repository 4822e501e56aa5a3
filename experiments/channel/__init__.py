"""The control channel between gateways and the scheduler."""
