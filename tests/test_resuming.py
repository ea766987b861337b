"""Membership under another supervisor: what is gone on with, what begins anew, what is remembered of an older term."""

from __future__ import annotations

import msgspec
import pytest
from model.agents import report
from model.swapping import Swapping
from model.takeover import plan_of

from phoenix_launch.copies import Stamp
from phoenix_launch.job import membership
from phoenix_launch.job.commit import Lineage
from phoenix_launch.job.events import Admitted, Inherited, Reported, Resumed, StopAsked
from phoenix_launch.job.resuming import merged
from phoenix_launch.job.state import NodeState, Phase, Rung, State
from phoenix_launch.messages import NodePlan, PlanPhase, Resumption
from phoenix_launch.wire import Generation

NOW = 1000.0


@pytest.fixture
def running() -> tuple[State, dict[int, Inherited]]:
    """Two ranks on two nodes and a spare node, past their first steps; and what their nodes say."""
    model = Swapping()
    agents = model.start.agents
    nodes = {n: Inherited(plan_of(agent.told), report(n, agent)) for n, agent in enumerate(agents)}
    return model.states[model.start.state], nodes


def resumed(state: State, nodes: dict[int, Inherited], term: int = 2) -> State:
    written = msgspec.json.decode(msgspec.json.encode(state), type=State)
    assert written == state
    return membership.step(written, Resumed(term, nodes), NOW)[0]


def test_a_job_that_runs_is_gone_on_with_and_its_next_generation_has_the_new_term(
    running: tuple[State, dict[int, Inherited]],
) -> None:
    state, nodes = running
    after = resumed(state, nodes)
    assert (after.phase, after.generation, after.holders) == (Phase.RUNNING, state.generation, state.holders)
    assert all(member.heard == NOW for member in after.members.values())
    assert after.following == Generation(2, state.generation.n + 1)
    lost, _ = membership.step(after, Reported(1, msgspec.structs.replace(nodes[1].report, seq=2, complaint="no")), NOW)
    assert (lost.phase, lost.rung, lost.generation) == (Phase.SWAPPING, Rung.IN_PLACE, after.following)


def test_a_node_that_does_not_follow_is_lost_and_replaced(running: tuple[State, dict[int, Inherited]]) -> None:
    state, nodes = running
    after = resumed(state, {n: node for n, node in nodes.items() if n != 1})
    assert after.members[1].state is NodeState.LOST
    assert (after.phase, after.rung, after.generation.term) == (Phase.SWAPPING, Rung.IN_PLACE, 2)


def test_a_plan_of_which_one_node_has_heard_is_planned_anew_above_it(
    running: tuple[State, dict[int, Inherited]],
) -> None:
    state, nodes = running
    newer = Generation(1, state.generation.n + 5)
    sent = NodePlan(newer, PlanPhase.SWAP, resumption=Resumption(None, (Stamp(newer, 3),)))
    after = resumed(state, {**nodes, 2: Inherited(sent, nodes[2].report)})
    assert (after.phase, after.rung, after.generation) == (Phase.QUIESCING, Rung.FROM_SLOTS, Generation(2, newer.n + 1))
    assert after.lineage.resumes == (Stamp(newer, 3),)
    assert {bundle.key for bundle in after.bundles} == {"own0", "own1"}


def test_a_job_that_stops_goes_on_stopping(running: tuple[State, dict[int, Inherited]]) -> None:
    state, nodes = running
    stopping, _ = membership.step(state, StopAsked(15), 0.0)
    after = resumed(stopping, nodes)
    assert after.phase is Phase.STOPPING and after.outcome == stopping.outcome and after.since == NOW


def test_a_node_that_is_admitted_later_is_a_spare_one(running: tuple[State, dict[int, Inherited]]) -> None:
    state, nodes = running
    after = resumed(state, {n: node for n, node in nodes.items() if n != 2})
    assert after.phase is Phase.RUNNING
    again = Admitted(index=2, name="node2", domain="d2", slots=1, incarnation="new")
    assert membership.step(after, again, NOW)[0].members[2].spare


def test_lineages_are_united_and_what_says_no_more_is_left_out() -> None:
    first, second, third = Stamp(Generation(1, 2), 10), Stamp(Generation(1, 3), 8), Stamp(Generation(2, 4), 12)
    known = NodePlan(Generation(2, 4), PlanPhase.RUN, resumption=Resumption(None, (second, third)))
    assert merged(Lineage((first,)), [known, NodePlan(Generation(1, 1), PlanPhase.RUN)]).resumes == (second, third)
