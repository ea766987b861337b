"""Walks every state that a model can reach, or at random through one that has too many, and says how one gets to a state
that breaks a promise.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class Broken(AssertionError):
    """A promise that does not hold in some state."""


@dataclass(frozen=True, slots=True)
class Move(Generic[S]):
    """`fault`: something goes wrong with it, so that nobody may count on it to happen."""

    label: str
    target: S
    fault: bool = False


@dataclass(frozen=True, slots=True)
class Exploration:
    states: int
    moves: int
    faulty: int  # moves that are faults
    ends: int  # states from which nothing follows


def explore(start: S, moves: Callable[[S], Iterable[Move[S]]], goal: Callable[[S], bool], limit: int) -> Exploration:
    """All states from `start`. Raises Broken where `moves` does, or where a state has no way, free of faults, to one that is
    a `goal`; with the way there in its text. `limit`: more states than this are a mistake of the model."""
    number: dict[S, int] = {start: 0}
    states: list[S] = [start]
    parents, labels = array("l", [-1]), [""]
    sources, targets = array("l"), array("l")
    faulty = ends = 0
    for index, state in enumerate(states):  # grows as it is walked
        if index > limit:
            raise Broken(f"more than {limit} states")
        try:
            following = list(moves(state))
        except AssertionError as error:
            raise Broken(f"{error}\n  after: {_way(index, parents, labels)}\n  in: {state}") from error
        ends += not following
        for move in following:
            there = number.get(move.target)
            if there is None:
                there = number[move.target] = len(states)
                states.append(move.target)
                parents.append(index)
                labels.append(move.label)
            if move.fault:
                faulty += 1
            else:
                sources.append(index)
                targets.append(there)
    stuck = _without_a_way(states, goal, sources, targets)
    if stuck is not None:
        raise Broken(f"stuck\n  after: {_way(stuck, parents, labels)}\n  in: {states[stuck]}")
    return Exploration(len(states), len(sources) + faulty, faulty, ends)


def _way(index: int, parents: array[int], labels: list[str]) -> str:
    way: list[str] = []
    while index > 0:
        way.append(labels[index])
        index = parents[index]
    return "; ".join(reversed(way))


def _without_a_way(states: list[S], goal: Callable[[S], bool], sources: array[int], targets: array[int]) -> int | None:
    """The first state from which no goal can be reached, backwards from the goals."""
    before: list[list[int]] = [[] for _ in states]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    good = bytearray(len(states))
    open_ = [index for index, state in enumerate(states) if goal(state)]
    for index in open_:
        good[index] = 1
    while open_:
        for source in before[open_.pop()]:
            if not good[source]:
                good[source] = 1
                open_.append(source)
    bad = good.find(0)
    return bad if bad >= 0 else None


def wander(
    start: S, moves: Callable[[S], Iterable[Move[S]]], goal: Callable[[S], bool], seed: int, *, length: int, calm: float
) -> int:
    """One random way of `length` moves, then free of faults to a goal. `calm`: how unlikely a fault is, 0 to 1. Returns how
    many moves it made. Raises Broken as `explore` does."""
    chance = random.Random(seed)
    state = start
    way: list[str] = []
    for count in range(3 * length):
        try:
            following = list(moves(state))
        except AssertionError as error:
            raise Broken(f"{error}\n  after: {'; '.join(way)}\n  in: {state}") from error
        if not following or (count >= length and goal(state)):
            return count
        quiet = [move for move in following if not move.fault]
        faults = [move for move in following if move.fault]
        struck = faults and count < length and (chance.random() > calm or not quiet)
        kind = faults if struck else quiet
        if not kind:
            if goal(state):
                return count
            break
        move = chance.choice(kind)
        way.append(move.label)
        state = move.target
    raise Broken(f"stuck\n  after: {'; '.join(way)}\n  in: {state}")
