"""Tests of recordings, replays and what-if results."""
