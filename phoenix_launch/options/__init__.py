"""What the user asked for: the options, their values and where each came from."""
