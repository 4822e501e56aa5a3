"""Learned state on disk or in a bucket: `keeper` says when, `store` how."""
