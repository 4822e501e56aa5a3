"""Recordings, replays and what they tell."""
