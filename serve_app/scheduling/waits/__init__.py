"""Why requests wait: each nanosecond in the queue has one cause, and the causes add up to the wait.

Read `causes` for what can keep a request waiting, `account` for how the time of many requests is kept at the
cost of one, and `watch` for how the causes are told apart.
"""
