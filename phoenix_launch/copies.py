"""Training state in memory, in words: what a report offers and a plan names. The rules are in `job/commit.py`."""

from __future__ import annotations

import enum

import msgspec

from phoenix_launch.wire import Generation


class Stamp(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Which state it is: the generation that computed it, and the version (steps completed before it)."""

    generation: Generation
    version: int


class Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One in-memory copy of one bundle. `layout`: digest of names, shapes and types; `sealed`: it is whole."""

    stamp: Stamp
    layout: str = ""
    sealed: bool = True


class KeptSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node keeps this slot of the bundle with this key, its own or another node's replica."""

    bundle: str
    slot: Slot


class SourceKind(enum.Enum):
    """Where a rank takes a bundle from; cheapest first."""

    ITSELF = "itself"  # live there; the private bundle from the copy that was taken at the step's entry
    OWN_NODE = "own-node"  # a slot of the node it runs on
    OTHER_NODE = "other-node"  # a slot of another node, one of its own or a replica
    HOLDER = "holder"  # another rank that is live and holds the same bundle


class Source(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One bundle of one rank comes from here. `node`: whose slot, or where the `holder` runs."""

    bundle: str
    kind: SourceKind
    node: int
    holder: int = -1


class StartupCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank's private bundle is, of whichever version: what a replacement's start needs of it is the same in all."""

    source: Source
    stamp: Stamp


class SlotPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another node's checkpoint server."""

    node: int
    address: str
    port: int
