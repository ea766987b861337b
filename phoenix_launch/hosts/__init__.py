"""Which hosts take part, how they are reached, and whether they are fit."""
