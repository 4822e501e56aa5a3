"""Token estimates of requests, learned from the token counts of engines, without a tokenizer.

`byte_classes` measures a text, `prompt_length` learns the tokens of each class of bytes and of the chat
template, `media_tokens` those of media, and `output_length` learns answers. `estimate` combines them into the
token budget.
"""
