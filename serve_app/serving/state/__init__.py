"""Learned state on disk or in a bucket: `store` reads and writes it, `keeper` decides when."""
