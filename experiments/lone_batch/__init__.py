"""How well an engine is served whose load nobody can see."""
