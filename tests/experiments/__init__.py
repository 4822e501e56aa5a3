"""Tests of the experiments and their shared machinery."""
