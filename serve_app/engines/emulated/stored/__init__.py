"""What the emulated engine keeps besides its sequences: responses, and the names that it answers to.

Read `store`, then `responses`, which answers the endpoints; and `names`.
"""
