"""What a search costs the application beside it, live."""
