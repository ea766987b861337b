"""What a job decides: pure functions and state machines, no I/O, no clock."""
