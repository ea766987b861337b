"""Ranks that have other bits than most holders of the same tensors: they are ended, and their copies are not used. Pure."""

from __future__ import annotations

from dataclasses import replace

from phoenix_launch.job import holding
from phoenix_launch.job.events import CorruptionFound, FaultFound
from phoenix_launch.job.odd_bits import news, remembered, told
from phoenix_launch.job.straggling import Straggling

CORRUPT = "corruption"


class Corrupted(Straggling):
    def _find_corruption(self) -> None:
        """What ranks that are not odd themselves have found in this generation. The odd ones are condemned."""
        for found in news(self.state):
            state = self.state
            self.state = replace(state, odd=(*state.odd, remembered(state, found)))
            self.actions.append(CorruptionFound(found))
            blamed = [rank for rank in found.odd if holding.held(state, rank) and rank not in state.condemned]
            for rank in blamed:
                node = state.holders[rank].node
                self.actions.append(FaultFound(kind=CORRUPT, node=node, ranks=(rank,), detail=told(found)))
            if blamed:
                condemned = self.state.condemned | set(blamed)
                self.state = replace(self.state, condemned=condemned, verdict=CORRUPT, stacks_since=self.now)
