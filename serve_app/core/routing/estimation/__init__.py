"""Token estimates of requests, learned from the token counts of engines, without a tokenizer.

`byte_classes` measures a text, and `output_length` learns answers. `estimate` learns the tokens of each class
of bytes, of the chat template and of media, and combines all into the token budget.
"""
