"""The way of an engine's response to the client.

`engine_answer` decides whether a response may pass or the request is retried, `stream` scans and passes on
event streams, `assembly` makes one response of a stream, `client_api` and `responses` write errors in the API
of the client, `client` sends with a time limit and notices clients that leave, `waiting` writes to streams
that wait.
"""
