"""What a scheduler tells the page at `/dashboard`: an `overview` of now, and its `recent_activity`."""
