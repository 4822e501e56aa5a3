"""How well the time of engines is divided among tenants."""
