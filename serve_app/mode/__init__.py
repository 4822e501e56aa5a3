"""How much of a running application's traffic is scheduled, for people."""
