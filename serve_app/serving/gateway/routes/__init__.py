"""The endpoints that engines answer.

`table` has a line for each; `generation`, `messages`, `pooling` and `audio` say what is read of the bodies.
"""
