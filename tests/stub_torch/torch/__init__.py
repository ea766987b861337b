"""Stands in for torch where a test is about processes: a store that listens, and nothing that takes time to load."""

from __future__ import annotations


class Generator:
    """Random numbers that nobody draws."""

    def seed(self) -> int:
        return 0


default_generator = Generator()
