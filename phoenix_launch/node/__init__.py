"""A node's side: guardian and agent, its processes and what they write."""
