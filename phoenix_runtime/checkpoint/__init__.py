"""The worker's side of copies in memory: what is copied, by whom, when, and the way back."""
