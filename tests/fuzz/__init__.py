"""Inputs that nobody has written: made by mutation, and of the API's own description."""
