"""Maximum request rate of one scheduler, and the first limit beyond it."""
