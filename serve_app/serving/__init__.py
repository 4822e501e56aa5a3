"""Processes that run the scheduling core live: on Ray Serve, over sockets, for OpenAI clients.

Each process has a package or module: `gateway` (accepts and forwards requests), `scheduler` (drives the
core), `pool` (serves one engine on its own port), `remote` (watches endpoints elsewhere) and `tuner`.
`channel` connects gateways and replicas to the scheduler, and `state` persists learned state. Classes named
`Deployment` wrap each process for Ray Serve, and `serve_app.app` binds them together.
"""
