"""The endpoints that engines answer.

`table` has a line for each; `generation`, `messages` and `pooling` say what is read of the bodies.
"""
