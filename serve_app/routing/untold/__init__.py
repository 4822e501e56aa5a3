"""What an engine does not tell, and its answers and refusals teach: its context limit, and its pace."""
