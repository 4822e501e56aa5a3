"""An adaptive `B_short` against fixed ones, simulated."""
