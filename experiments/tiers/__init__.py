"""Two pools against three context tiers of the same price."""
