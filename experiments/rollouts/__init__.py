"""Client view of redeployments with other settings."""
