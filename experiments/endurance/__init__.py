"""A served application under overload, among clients that leave, and for half an hour."""
