"""Estimates of a request's tokens, learned from the token counts of engines, without a tokenizer.

`text_category` classifies the text, `bytes_per_token` learns a ratio for each category, and `overhead` learns
templates and media. `output_length` learns answers, by the curves of `length_curve`. `estimate` combines them
into the token budget.
"""
