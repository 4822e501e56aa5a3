"""The fleet that the planner sized, served."""
