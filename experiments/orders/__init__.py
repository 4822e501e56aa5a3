"""Every order of service with and without isolation, simulated."""
