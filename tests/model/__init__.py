"""Exhaustive explorations of the rules by which a job survives faults: small jobs, every order of everything.

`exploration` walks the graph of states; `training` (with `worlds`) and `swapping` (with `agents`) are the two models. Both call
the real rules of phoenix_launch.job; what a model adds is only the world around them. Their docstrings say what was left out,
and why nothing is lost by that.
"""
