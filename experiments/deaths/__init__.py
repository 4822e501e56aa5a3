"""Client view of repeated kills in a served application."""
