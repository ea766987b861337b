"""What a job leaves in its folder, and how it is read."""
