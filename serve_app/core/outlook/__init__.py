"""The outlook of queued requests: the position of each, and when it is expected to start.

Read `order` for the expected order of dispatch, `estimates` for the expected start of a position, `spread`
for the errors of estimates, and `watched` for the notifications of subscribed requests.
"""
