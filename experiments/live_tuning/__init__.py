"""A served application that tunes itself under load."""
