"""The Batch API: files of requests that are served on the capacity that other traffic leaves.

Reading order: `records` (a file and a batch), `store` (their database), `contents` and `storage` (the files'
contents), `upload` and `lines` (forms, and validation of their lines), `api` (the endpoints), `runner` (which
gateway serves the requests) and `calls` (one request of a batch).
"""
