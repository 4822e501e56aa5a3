"""Searches for better settings: in the digital twin, and on production itself."""
