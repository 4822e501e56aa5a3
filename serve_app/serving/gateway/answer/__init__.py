"""The way of an engine's response to the client.

`responses` decides whether a response may pass or the request is retried, writes errors in the client's API,
sends with a time limit and detects disconnects. `stream` scans event streams and passes them on, and writes
to streams that wait. `assembly` assembles one response from them, or continues them.
"""
