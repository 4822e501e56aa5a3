"""What clients hear when parts of a served application are killed, again and again."""
