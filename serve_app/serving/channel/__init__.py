"""The control channel: one TCP connection from every gateway and every replica to its model's scheduler.

Read `scheduler_client` (what a gateway asks for), `messages` (what is said), `framing` and `link` (how it
travels, and how a dead peer is noticed). Then read `gateway_sessions` (the rules by which nothing is lost
or repeated) and `gateway_client`, their other end. `server`, `replica_registry`, `connector` and
`replica_client` complete it.
"""
