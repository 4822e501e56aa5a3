"""The gateway's side of connections from HAProxy, in the place of uvicorn's and Ray Serve's own.

Serve starts the server and ends it. What lies between its socket and the gateway costs more than the gateway
itself, so requests for the gateway take a shorter way: `connection`, then `exchange`. `ingress` tells when.
"""
