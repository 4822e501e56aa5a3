"""The log of concluded requests.

`concluded` is a request that has ended, `lines` says of it what the log has, as text or as fields, and
`request_log` writes many of them at a time, fewer of those that were refused than there are in a flood.
"""
