"""The pool replica process: one engine on its own port.

Reading order: `replica` (life cycle, reports and draining), `guard` (access check), `server` (its port), then
`deployment` (the replica in Ray Serve). `serving.autoscaling` sets the number of replicas.
"""
