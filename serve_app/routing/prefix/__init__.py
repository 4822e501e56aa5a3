"""Prefix affinity: sending a prompt to a replica that has its beginning cached, where that saves time.

`blocks` cuts prompts, `index` records which replica was sent which blocks, `affinity` weighs the saving.
"""
