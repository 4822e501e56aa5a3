"""Choice of replicas: cached prefixes and unlike speeds."""
