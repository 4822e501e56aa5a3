"""Prefix affinity: sending a prompt to a replica that has its beginning cached, where that saves time.

`blocks` cuts prompts, `replica_cache` keeps those that one replica was sent, `index` those of all, and
`affinity` weighs the saving.
"""
