"""The shells that make the scheduling core live: on Ray Serve, over sockets, for OpenAI clients.

One folder a process: `gateway` (takes requests and forwards them), `scheduler` (drives the core), `pool`
(serves an engine on a port of its own, and sizes its pool), `tuner`. Between them lies `channel`, by
which gateways and replicas talk to the scheduler; `state` keeps what was learned. The `deployment`
modules give each process its life under Ray, and `serve_app.app` binds all of it together.
"""
