"""Command `serve`: starts and stops an application.

Two processes share the work. The *supervisor* owns the terminal and the signals. The *host* owns Ray, in a
separate session, so a closed terminal or Ctrl-C does not reach Ray's processes before the in-flight requests
have ended. They exchange messages, one per line.

- `command`: checks the configuration and runs the `supervisor`, which starts the `host`.
- `cluster`: Ray and Ray Serve for the host, and the drain of gateways; `failures` diagnoses a start.
- `processes`: the messages, and cleanup of all processes.
- `changes`: effects of a changed configuration on a running application.
- `instance`: registry of running applications, and the environment of Ray's processes.
"""
