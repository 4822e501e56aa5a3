"""Inputs that nobody has written: made by hypothesis, by schemathesis from the API's description, by mutation."""
