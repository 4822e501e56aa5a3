"""What a traced request costs a gateway: see `run`."""
