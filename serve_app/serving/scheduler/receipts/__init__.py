"""Receipts of the last requests, and what is drawn up from them."""
