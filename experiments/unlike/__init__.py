"""Replicas of one pool that differ in speed."""
