"""One pool or two: fleets planned in simulation, beside closed forms and published figures."""
