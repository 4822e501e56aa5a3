"""The way of an engine's answer to the client.

`engine_answer` decides whether an answer may pass or the request is retried, `engine_error` brings errors
into OpenAI's shape, `sse` watches streams, `passing` passes them on while they arrive, `usage` reads token
counts, `responses` writes the gateway's own errors, `disconnect` notices clients that leave, `client_stream`
those that stop reading, and `assembly` makes one answer of a stream.
"""
