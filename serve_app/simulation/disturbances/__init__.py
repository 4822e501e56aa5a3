"""What goes otherwise than a policy assumes: when which requests arrive, and what is known of them."""
