"""Prefix affinity: send a prompt where its beginning is cached, if that pays.

`blocks` cuts prompts, `index` remembers which replica was sent which blocks, `affinity` weighs the saving.
"""
