"""Prefix affinity: prefers replicas that have probably computed the start of a prompt already.

Read `blocks` (the units of a prompt), `replica_cache` (the blocks of one replica), `index` (the replicas that
have a block) and `affinity` (cached prefixes against load).
"""
