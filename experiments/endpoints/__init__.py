"""Fleets of endpoints that run elsewhere: their cost in front, and how soon a change is noticed."""
