"""The search for the cheapest fleet that meets the limits.

`fleets` says what a fleet is, `sizing` asks the queueing model, `verification` asks the simulator,
`smallest` finds the smallest numbers, `search` puts them together.
"""
