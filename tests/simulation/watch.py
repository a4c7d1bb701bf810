"""Watches the log as it grows: asks the invariants about each append, then folds it."""

import inspect
from typing import TYPE_CHECKING

from plait.events import ids
from plait.events.content import unseal
from plait.events.store import Recorded
from plait.events.types import (
    Content,
)
from plait.services.replies.ledger import Ledger
from tests.simulation.facts import Facts

if TYPE_CHECKING:
    from tests.simulation.world import World

from tests.simulation.invariants import EACH_STEP
from tests.simulation.rest import AT_REST


class Watch:
    """Folds the log into facts as it grows, and reports the first invariant that is broken."""

    def __init__(self, world: "World") -> None:
        self.facts = Facts()
        self._world = world
        self._log: list[Recorded] = []
        self._pending: dict[str, Ledger] = {}
        self.writer = ""  # of the append that is looked at

    def log(self) -> list[Recorded]:
        return self._log

    def text(self, content: Content | None) -> str | None:
        if content is None:
            return None
        data = content.data or self._world.blobs._blobs.get(content.blob or "")
        return None if data is None else unseal(data)

    def appended(self, recorded: Recorded, who: str) -> None:
        self._log.append(recorded)
        self.writer = who
        try:
            for invariant in EACH_STEP:
                for broken in invariant(self.facts, recorded, self._world):
                    self._world.fail(invariant.__name__, f"{broken} (#{recorded.sequence}, {who})")
            self.facts.fold(recorded)
        except Exception as error:  # noqa: BLE001 - a log that makes no sense is a violation
            place = inspect.trace()[-1]
            self._world.fail("the_log_makes_sense", f"{error!r} in {place.function}", error)
            return
        ledger = self._pending.get(recorded.stream.tenant)
        if ledger is None:
            ledger = Ledger(self._world.plan.settings.turns_admitted)
            self._pending[recorded.stream.tenant] = ledger
        ledger.fold(recorded)
        ledger.opened.clear()

    def tool_runs(self, who: str, call: str) -> None:
        """A tool whose result is recorded is not run again by who could know (1-model)."""
        branch = self.facts.branches.get(ids.branch_of(call))
        turn = branch.turn if branch is not None else None
        if turn is not None and turn.worker == who and 0 < turn.calls.get(call, 0) < turn.claimed:
            self._world.fail("recorded_results_are_not_run_again", f"{who} runs {call} again")

    def open_matters(self) -> str:
        """What is owed at this moment; empty when nothing is."""
        facts = self.facts
        left: list[str] = []
        for branch in facts.branches.values():
            if branch.turn is not None:
                left.append(f"turn {branch.turn.id} is {branch.turn.status}")
            if branch.arrivals:
                left.append(f"{[*branch.arrivals]} wait in the inbox of {branch.id}")
            if branch.owed and branch.turn is None:
                left.append(f"{branch.id} owes {[*branch.owed]}")
        left += [f"{wait} is open" for wait in facts.open_waits]
        left += [
            f"{name} has not arrived"
            for name, message in facts.messages.items()
            if not (message.received or message.refused or message.closes_cycle)
        ]
        for ledger in self._pending.values():
            left += [f"the ledger holds {key}" for key in ledger.effects]
            if ledger.runnable:
                left.append(f"{ledger.runnable} turns are not admitted")
        return "; ".join(left[:8])

    def at_rest(self) -> None:
        for invariant in AT_REST:
            for broken in invariant(self.facts, self._world):
                self._world.fail(invariant.__name__, broken)
