"""Several schedulers for one model, each with leases on a part of the replicas' capacity."""
