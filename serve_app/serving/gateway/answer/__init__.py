"""The way of an engine's response to the client; `path` begins it.

`responses` decides whether a response may pass or the request is retried, and writes errors in the client's
API. `stream` scans event streams, and writes to streams that wait. `assembly` assembles one response from
them, or continues them. `stored` finds the replica of a response that its engine stores.
"""
