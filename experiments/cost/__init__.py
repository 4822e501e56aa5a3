"""Experiment: CPU time of gateway and scheduler by the kind of request and by feature."""
