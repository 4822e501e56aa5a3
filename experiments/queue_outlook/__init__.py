"""How honest waiting requests are told when they start."""
