"""EWSJF as published, with its meta-optimiser, in the set-up of its paper, simulated."""
