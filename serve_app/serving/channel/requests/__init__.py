"""What the ends of the channel know of requests: pending at a gateway, booked at a scheduler, or orphaned."""
