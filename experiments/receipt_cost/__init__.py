"""What receipts cost a gateway and a scheduler: see `run`."""
