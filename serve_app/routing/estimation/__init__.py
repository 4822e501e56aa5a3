"""How many tokens a request will take, learned from engines' answers, without a tokenizer.

`text_category` names the kind of text, `bytes_per_token` learns one ratio for each, `overhead` learns
templates and media, `output_length` learns answers; `estimate` joins them into the token budget.
"""
