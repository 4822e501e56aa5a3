"""The tuner process: `actor` learns length queues, `parameter_tuner` runs the search for better settings."""
