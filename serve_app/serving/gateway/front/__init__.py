"""The gateway's side of connections from HAProxy or from clients, in the place of uvicorn's and Serve's own.

- Behind HAProxy, Serve starts the server and ends it. What lies between its socket and the gateway costs more
  than the gateway itself, so requests for the gateway take a shorter way: `connection`, then `exchange`.
  `ingress` tells when.
- Without a front end the gateway has a server of its own, on the application's address: `own_port`. Which of
  both it is, `of_serve` asks.
"""
