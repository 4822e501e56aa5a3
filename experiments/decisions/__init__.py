"""What the scheduler's decisions earn, each against the variant that lacks only that decision."""
