"""One pool against two under KV pressure: preemptions, refusals and tails, simulated."""
