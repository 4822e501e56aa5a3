"""What an application says would have helped a request, beside what really would have."""
