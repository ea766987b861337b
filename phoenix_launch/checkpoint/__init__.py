"""The node's memory: slots that hold the training state, the process that owns them, and its copies on other nodes."""
