"""The control channel: one TCP connection from every gateway and every replica to its model's scheduler.

Read `messages` (what is said), `framing` and `link` (how it travels and how a dead peer is noticed), then
`gateway_desk` (the rules by which nothing is lost or repeated) and `gateway_client` (the other end of them).
`server`, `replica_desk`, `connector` and `replica_client` are what remains: doors, tables, patience.
"""
