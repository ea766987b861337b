"""The launcher of phoenix-run: everything that starts, watches and ends processes. No torch anywhere in it."""

__version__ = "0.1.0"
