"""Answers in OpenAI's formats, whole or as a stream of events.

`completions` and `responses` write placeholder text at little cost per token; `scripted` and
`scripted_responses` write what a request prescribes; `embeddings` writes vectors.
"""
