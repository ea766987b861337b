"""How a job comes to run: its first line-up, and a generation whose workers all start anew. Pure."""

from __future__ import annotations

from dataclasses import replace

from phoenix_launch.errors import EXIT_WORKER_FAILED
from phoenix_launch.job import placement
from phoenix_launch.job.events import GenerationRuns
from phoenix_launch.job.placement import Candidate
from phoenix_launch.job.state import Endpoint, Member, Outcome, Phase, Rung
from phoenix_launch.job.swapping import Swapping


class Starting(Swapping):
    def _settle_starting(self) -> None:
        rules, candidates = self.state.rules, self._candidates()
        training = [c for c in candidates if not c.spare]
        here = [m for m in self.state.members.values() if m.alive]
        patience = rules.join_timeout if self.state.members else rules.join_timeout + rules.start_timeout
        late = self.now - self.state.since > patience
        loading = len(here) > len(candidates)  # that has its own timeout: a node that came in time is waited for
        if len(training) >= rules.seats_max or (late and not loading and len(candidates) >= rules.seats_min):
            lineup = placement.first_lineup(candidates, min(rules.seats_max, len(candidates)))
        elif self._starting_spares_must_help(training, candidates):
            lineup = placement.first_lineup(candidates, rules.seats_max)
        else:
            lineup = None
        if lineup is not None:
            self._begin(lineup)
        elif late and len(here) < rules.seats_min:
            self._leave(self._too_few(here))

    def _starting_spares_must_help(self, training: list[Candidate], candidates: list[Candidate]) -> bool:
        """A training node was lost before the start: no use waiting for it when a spare node is ready."""
        gone = [m for m in self.state.members.values() if not m.alive and not m.spare]
        return bool(gone) and len(training) + len(gone) >= self.state.rules.seats_max <= len(candidates)

    def _too_few(self, here: list[Member]) -> Outcome:
        names = ", ".join(m.name for m in here) or "none"
        return Outcome(
            exit_code=EXIT_WORKER_FAILED,
            text=f"{len(here)} of {self.state.rules.seats_min} nodes came within "
            f"{self.state.rules.join_timeout:g} s (here: {names})",
            hint="start the same command on the other hosts, or raise join_timeout in --rdzv-conf",
        )

    def _settle_quiescing(self) -> None:
        state = self.state
        if self._seat_empty():
            self._refill()
            return
        alive = [m for m in state.members.values() if m.alive]
        seated = {seat.node for seat in state.lineup}
        from_slots = state.rung is Rung.FROM_SLOTS
        slow = [
            member
            for member in alive
            if (member.index in seated or member.live)
            and (member.quiesced < state.generation or (from_slots and member.offered < state.generation))
        ]
        if not slow and state.store is not None:
            self._plan_from_slots()
            self._enter(Phase.RUNNING, leave=False)
            self.actions.append(GenerationRuns(state.generation))
        elif self.now - state.since > state.rules.shutdown_timeout + state.rules.teardown_timeout:
            for member in slow or [state.members[state.store_node]]:
                self._lose(member.index, "did not end its old workers in time" if slow else "its store did not start")
            self._refill()

    def _store_told(self, address: str, port: int, error: str) -> None:
        if not error:
            self.state = replace(self.state, store=Endpoint(address, port))
        elif self.state.phase is Phase.QUIESCING and self.state.store is None:
            if not (self.state.rules.master_port and self.state.generation.n == self.state.first):
                self._lose(self.state.store_node, f"its store cannot start: {error}")  # another node hosts the next one
                return
            self._leave(
                Outcome(
                    exit_code=EXIT_WORKER_FAILED, text=f"the store of {self.state.generation} cannot start: {error}",
                    hint="choose another --master-port, or leave it to phoenix-run",
                )
            )  # fmt: skip
