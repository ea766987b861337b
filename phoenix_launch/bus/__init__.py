"""The control bus: ZeroMQ sockets under CURVE, where a peer is who its key says and nobody else is heard.

A module for each end, so that a command such as `status` loads no more than its own: it has 0.2 s in all. A socket belongs
to the thread that made it, except that an `OutputSender` belongs to the output pump that uses it.
"""
