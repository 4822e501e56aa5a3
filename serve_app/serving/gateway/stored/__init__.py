"""Responses that engines keep: which replica keeps one, how it is asked for, and work in the background.

Read `holders`, then `stored_responses` and `background`.
"""
