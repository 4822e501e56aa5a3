"""Token estimates of requests, learned from the token counts of engines, without a tokenizer.

`text_category` classifies the text, `bytes_per_token` learns a ratio for each category, `overhead` learns
chat templates and media, and `output_length` learns answers. `estimate` combines them into the token budget.
"""
