"""What engines do not tell, observed from what becomes of the requests that they are sent.

`concurrency` limits what is in flight, `learned_batch` and `learned_context` learn two limits, and
`answer_watch` notices an engine that has hung.
"""
