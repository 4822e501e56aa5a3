"""The outlook of waiting requests: which place each has, and when it is expected to start.

Read `order` for the order in which waiting requests are expected to be dispatched, `spread` for how far
estimates are off, `estimates` for the time that follows from a place, and `watched` for who is told.
"""
