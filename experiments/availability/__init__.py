"""Client view of failures and rollouts of a served application."""
