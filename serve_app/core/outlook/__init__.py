"""The outlook of queued requests: the position of each, and when it is expected to start.

Read `watched` for the order, the expected starts, and the notifications of subscribed requests, and `spread`
for the errors of estimates.
"""
