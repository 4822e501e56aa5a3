"""The Batch API: files of requests that are served on the capacity that other traffic leaves.

Reading order: `store` (files and batches, their database, and the files' contents), `api` (the endpoints, and
uploads), `runner` (validation of lines, which gateway serves the requests, and each request of a batch) and
`settings`.
"""
