"""What a gateway's reading of a request costs, by the kind of its body."""
