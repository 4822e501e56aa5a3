"""The Batch API: files of requests that are served on the capacity that other traffic leaves.

Read `records.py` (what a file and a batch are), `store.py` (their database), `upload.py` (validation),
`runner.py` (who serves the requests) and `api.py` (the endpoints).
"""
