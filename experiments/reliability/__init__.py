"""One pool against two under KV pressure: preemptions, rejections and tails, simulated."""
