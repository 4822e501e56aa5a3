"""Processes that run the scheduling core live: on Ray Serve, over sockets, for OpenAI clients.

`serve_app.app` binds the processes together; classes named `Deployment` wrap each for Ray Serve. In reading
order:

- `gateway`: accepts requests and forwards them to replicas, on its `http_server`.
- `scheduler`: drives the core.
- `channel`: connects gateways and replicas to the scheduler.
- `pool`, `remote`: one engine on its own port, and watchers of endpoints elsewhere.
- `tuner`: learns length queues, and searches for better settings.
- `deployments`, `autoscaling`: versions of deployments, and their numbers of replicas.
- `state`: persists learned state.
- `access`, `api_keys`, `tls`: admins and local addresses, key files, and certificates.
- `listening`, `socket_holder`, `process`, `watchdog`: sockets, and the runtime of each process.
- `metric_cells`, `cached_page`: metrics at minimal cost.
- `_ray`: private interfaces of Ray.
"""
