"""The states of the training model, as small tuples, and the one name that states get which go on alike."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TypeAlias

from phoenix_launch.copies import Slot, Stamp
from phoenix_launch.job import commit
from phoenix_launch.job.commit import Bundle, Lineage, SlotPair
from phoenix_launch.wire import Generation


def sharded(ranks: int) -> tuple[Bundle, ...]:
    """FSDP: what a rank holds nobody else does."""
    return tuple(Bundle(f"own{rank}", (rank,), private=True) for rank in range(ranks))


def replicated(ranks: int) -> tuple[Bundle, ...]:
    """DDP: the private state of each rank, and the model, which all hold."""
    return (*sharded(ranks), Bundle("shared", tuple(range(ranks))))


# a slot in a state: (generation, version, sealed), or None; a pair is sorted, None first
Cell: TypeAlias = tuple[int, int, bool] | None
Cells: TypeAlias = tuple[Cell, Cell]

RUNNING, ABORTING, RESTORING, OVER = "running", "aborting", "restoring", "over"
LIVE, STEPPING, LEFT, DIRTY, DEAD, LOADING, LOADED = "live", "stepping", "left", "dirty", "dead", "loading", "loaded"
UNDECIDED, VOTED, CHOSEN, SKIPPED = 0, 1, 2, 3


class Rank(NamedTuple):
    node: int
    status: str
    generation: int  # that computed its state
    version: int
    round: int = UNDECIDED
    complete: int = commit.NO_VERSION


class World(NamedTuple):
    phase: str
    generation: int
    resume: int  # where this generation began
    lineage: tuple[tuple[int, int], ...]
    alive: tuple[bool, ...]
    ranks: tuple[Rank, ...]
    slots: tuple[tuple[Cells, ...], ...]  # [node][bundle]
    faults: int  # that may still happen
    cover: int = 0  # 2 when all copies of a version are there, one less with each fault since
    floor: int = commit.NO_VERSION  # after a fault that is the only one so far: what was complete when it happened


@cache
def slot(cell: Cell) -> Slot | None:
    return None if cell is None else Slot(Stamp(Generation(1, cell[0]), cell[1]), sealed=cell[2])


@cache
def pair(cells: Cells) -> SlotPair:
    return (slot(cells[0]), slot(cells[1]))


@cache
def lineage_of(resumes: tuple[tuple[int, int], ...]) -> Lineage:
    return Lineage(tuple(Stamp(Generation(1, generation), version) for generation, version in resumes))


def ordered(first: Cell, second: Cell) -> Cells:
    return (first, second) if (first or (-1, -1, False)) <= (second or (-1, -1, False)) else (second, first)


def covered(world: World, complete: int) -> World:
    return world._replace(cover=2) if complete >= 0 else world


def put(world: World, i: int, rank: Rank) -> World:
    ranks = list(world.ranks)
    ranks[i] = rank
    return world._replace(ranks=tuple(ranks))


def shelve(world: World, node: int, number: int, cells: Cells) -> World:
    rows = [list(pairs) for pairs in world.slots]
    rows[node][number] = cells
    return world._replace(slots=tuple(tuple(row) for row in rows))


def closed(cells: Cells) -> Cells:
    """Open slots are void when a generation begins."""
    first, second = (cell if cell and cell[2] else None for cell in cells)
    return ordered(first, second)


def canonical(world: World) -> World:
    world = counted(world)
    if len(world.ranks) != 2:
        return world
    homes = [r.node for r in world.ranks]
    order = (*homes, *(node for node in range(len(world.alive)) if node not in homes))
    one = renamed(world, (0, 1), order)
    other = renamed(world, (1, 0), (order[1], order[0], *order[2:]))
    return one if hash(one) <= hash(other) else other


def renamed(world: World, ranks: tuple[int, ...], nodes: tuple[int, ...]) -> World:
    """With rank `ranks[0]` called 0, node `nodes[0]` called 0 ..."""
    count = len(world.slots[0])
    bundles = tuple(range(count)) if ranks == (0, 1) else (1, 0, *range(2, count))  # private ones follow their ranks
    return world._replace(
        alive=tuple(world.alive[node] for node in nodes),
        ranks=tuple(world.ranks[rank]._replace(node=nodes.index(world.ranks[rank].node)) for rank in ranks),
        slots=tuple(tuple(world.slots[node][number] for number in bundles) for node in nodes),
    )


def counted(world: World) -> World:
    """Versions from the oldest in use, generations in order."""
    cells = [cell for pairs in world.slots for cells in pairs for cell in cells if cell]
    base = min([r.version for r in world.ranks] + [cell[1] for cell in cells])
    stamps = {r.generation for r in world.ranks} | {cell[0] for cell in cells}
    oldest = min(stamps)
    lineage = tuple(entry for entry in world.lineage if entry[0] > oldest)
    numbers = sorted(stamps | {world.generation} | {generation for generation, _ in lineage})
    if base == 0 and numbers[-1] == len(numbers) and len(lineage) == len(world.lineage):
        return world
    name = {generation: number for number, generation in enumerate(numbers, 1)}

    def since(version: int) -> int:
        return max(version - base, -1)

    def named(cells: Cells) -> Cells:
        first, second = (cell and (name[cell[0]], cell[1] - base, cell[2]) for cell in cells)
        return (first, second)

    return world._replace(
        generation=name[world.generation],
        resume=since(world.resume),
        floor=since(world.floor),
        lineage=tuple((name[generation], since(version)) for generation, version in lineage),
        ranks=tuple(
            r._replace(generation=name[r.generation], version=r.version - base, complete=since(r.complete))
            for r in world.ranks
        ),
        slots=tuple(tuple(named(cells) for cells in pairs) for pairs in world.slots),
    )
