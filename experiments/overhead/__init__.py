"""What the application costs per request."""
