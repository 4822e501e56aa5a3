"""The way from the bytes of a client's request to what scheduling needs.

`reader` is the way through: `headers`, `parse` (over `bodies`), `shape` (sizes and kind of text), `prefix`
(hashes of how the prompt begins), `splice` (fields added without writing the body again).
"""
