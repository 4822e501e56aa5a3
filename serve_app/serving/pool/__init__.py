"""The pool replica process: one engine on its own port.

Reading order: `replica` (life cycle, access check, HTTP server, reports and draining), then `deployment` (the
replica in Ray Serve). `serving.autoscaling` sets the number of replicas.
"""
