"""The shells that make the scheduling core live: on Ray Serve, over sockets, for OpenAI clients.

Follow a request: `gateway` (takes it in and forwards it), `dispatching` (what a gateway asks of a scheduler),
`channel` (how that travels), `scheduler_shell` (drives the core), `pool_replica` with `replica_server` and
`replica_guard` (serve an engine on a port of its own). The `*_deployment` modules and `scheduler_actor` give
each of them its life under Ray; `autoscaling` decides how many replicas a pool has; `serve_app.app` binds all
of it together.
"""
