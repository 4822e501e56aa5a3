"""The control channel: a TCP connection from every gateway and every replica to its model's scheduler.

Reading order: `scheduler_client` (a gateway's interface), `messages` (the protocol), `link` (framing, flow
control and detection of dead peers), `gateway_sessions` (the rules by which nothing is lost or repeated, and
the registration of replicas) and their other end, `gateway_client`. Then `server`, `connector`,
`replica_client` and `settings`.
"""
