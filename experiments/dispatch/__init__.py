"""What the scheduler itself costs per request."""
