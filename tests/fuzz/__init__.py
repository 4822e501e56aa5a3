"""Fuzzing with generated inputs: mutations, and cases from the API's own description."""
