"""What Prometheus gets of a gateway: `/metrics` and `/metrics/engines`.

`metrics_endpoint` has the door and the gateway's own page, into which `exposition` joins those of its
schedulers. `engine_pages` passes the pages of engines on.
"""
