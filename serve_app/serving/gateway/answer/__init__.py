"""The way of an engine's response to the client.

`engine_answer` decides whether a response may pass or the request is retried. `stream` scans event streams
and passes them on, or assembles one response from them. `client_api` and `responses` write errors in the
client's API. `client` sends with a time limit and detects disconnects. `waiting` writes to streams that wait.
"""
