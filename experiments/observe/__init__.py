"""What a scheduler that only observes forecasts, beside what scheduling then does."""
