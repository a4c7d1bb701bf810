"""The ledger of one tenant: what is owed across branches, and which turns may run. Pure.

A fold of the tenant's log, in its order, and of nothing else: two processes that have read as
far hold the same rows, give the same verdicts and admit the same turns (P12, P14, P15). A row
opens with the event that owes something and closes with the event that settles it; what stands
between, `service.py` carries out, as often as it takes.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from plait.events import ids
from plait.events.store import Recorded
from plait.events.types import (
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelFailed,
    ReplyLate,
    TurnEnded,
    TurnRequested,
    TurnResumed,
    TurnSuspended,
    WaitEnded,
)


class Effect(Struct, frozen=True):
    """Something to carry over. `source` is the branch whose event owes it: effects of one
    source go in its order (P13). `sequence` is that event's append."""

    key: tuple[str, str]
    source: str
    sequence: int


class Deliver(Effect, frozen=True):
    message_id: str


class Answer(Effect, frozen=True):
    """The end of the turn that read the message, or the target's refusal, for the sender."""

    message_id: str


class Note(Effect, frozen=True):
    """The target refused a message that nobody waits on: the sender is told (P17)."""

    message_id: str


class RefuseWait(Effect, frozen=True):
    """The wait would close a cycle."""

    wait_id: str
    reason: str


class Expire(Effect, frozen=True):
    wait_id: str
    reason: str


class Offer(Effect, frozen=True):
    """An admitted turn belongs on the work queue."""

    turn_id: str
    n: int


class Wait(Struct):
    """An open wait. `branch` waits for `target`; by hand (no call) nothing is held up by it."""

    branch: str
    target: str
    sender: str
    deadline: int
    sequence: int
    by_hand: bool


class Pause(Struct):
    """A turn that waits for nothing but time: it has a deadline and no edge."""

    branch: str
    deadline: int
    sequence: int


class _Runnable(Struct, frozen=True):
    turn_id: str
    n: int
    sequence: int


class Ledger:
    """`admitted_at_once` bounds the turns that hold a slot: from admission to suspension or end.

    `opened` collects the effects that the fold has opened since it was last drained.
    """

    def __init__(self, admitted_at_once: int) -> None:
        self.effects: dict[tuple[str, str], Effect] = {}
        self.opened: list[Effect] = []
        self.waits: dict[str, Wait | Pause] = {}
        self.admitted: dict[str, _Runnable] = {}
        self._limit = admitted_at_once
        self._queues = (_FairQueue(), _FairQueue())  # resumed and interactive; the rest
        self._edges: dict[str, dict[str, list[str]]] = {}  # waiting branch → target → wait ids
        self._deadlines: list[tuple[int, str]] = []

    def fold(self, recorded: Recorded) -> None:
        """Takes in one append. Every append once, in the log's order."""
        for event in recorded.append.events:
            fold = _FOLD.get(type(event))
            if fold is not None:
                fold(self, event, recorded)

    def due(self, now_ms: int) -> Iterator[Expire]:
        """The waits whose deadline has passed and that no event has ended yet."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, wait_id = heapq.heappop(self._deadlines)
            wait = self.waits.get(wait_id)
            if wait is None or ("expire", wait_id) in self.effects:
                continue
            reason = "no reply came before the wait's deadline"
            if isinstance(wait, Pause):
                reason = "the model may be asked again"
            effect = Expire(("expire", wait_id), wait.branch, wait.sequence, wait_id, reason)
            self.effects[effect.key] = effect
            yield effect

    def next_deadline(self) -> int | None:
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def runnable(self) -> int:
        """Turns that may run and have no slot yet."""
        return sum(map(len, self._queues))

    # -- messages ----------------------------------------------------------------------------

    def _sent(self, event: MessageSent, recorded: Recorded) -> None:
        branch = ids.branch_of(event.message_id)
        if event.deadline is not None:
            wait_id = ids.wait_id(event.message_id)
            wait = Wait(
                branch,
                event.target,
                event.sender,
                event.deadline,
                recorded.sequence,
                by_hand=event.call is None,
            )
            self.waits[wait_id] = wait
            heapq.heappush(self._deadlines, (event.deadline, wait_id))
            if event.call is not None:
                cycle = self._path(event.target, branch)
                if cycle is not None:
                    names = " → ".join([event.sender, *map(self._name, cycle[:-1]), event.sender])
                    reason = f"this wait would close a cycle: {names}. Send without waiting."
                    self._open(
                        RefuseWait(("cycle", wait_id), branch, recorded.sequence, wait_id, reason)
                    )
                    return
                self._edges.setdefault(branch, {}).setdefault(event.target, []).append(wait_id)
        self._open(
            Deliver(("deliver", event.message_id), branch, recorded.sequence, event.message_id)
        )

    def _received(self, event: MessageReceived, recorded: Recorded) -> None:
        if event.source == "from_branch":
            self.effects.pop(("deliver", event.message_id or ""), None)
        elif event.source == "note":
            self.effects.pop(("note", event.message_id or ""), None)

    def _refused(self, event: MessageRefused, recorded: Recorded) -> None:
        message = event.message_id
        if message is None:
            return
        self.effects.pop(("deliver", message), None)
        source = ids.branch_of(event.node_id)
        if event.wait:
            self._open(Answer(("answer", message), source, recorded.sequence, message))
        else:
            self._open(Note(("note", message), source, recorded.sequence, message))

    def _wait_ended(self, event: WaitEnded, recorded: Recorded) -> None:
        wait = self.waits.pop(event.wait_id, None)
        for kind in ("expire", "cycle"):
            self.effects.pop((kind, event.wait_id), None)
        if event.outcome not in ("expired", "cancelled"):
            self._answered(event.wait_id)
        if not isinstance(wait, Wait) or wait.by_hand:
            return
        targets = self._edges.get(wait.branch, {})
        waits = targets.get(wait.target, [])
        if event.wait_id in waits:  # A refused wait has no edge.
            waits.remove(event.wait_id)
            if not waits:
                del targets[wait.target]
            if not targets:
                del self._edges[wait.branch]

    def _late(self, event: ReplyLate, recorded: Recorded) -> None:
        self._answered(event.wait_id)

    def _answered(self, wait_id: str) -> None:
        self.effects.pop(("answer", ids.message_of(wait_id)), None)

    def _path(self, start: str, goal: str) -> list[str] | None:
        """The branches from `start` to `goal` along open waits, both included."""
        before: dict[str, str] = {start: ""}
        queue = deque([start])
        while queue:
            branch = queue.popleft()
            if branch == goal:
                path = [branch]
                while before[path[-1]]:
                    path.append(before[path[-1]])
                return path[::-1]
            for target in self._edges.get(branch, ()):
                if target not in before:
                    before[target] = branch
                    queue.append(target)
        return None

    def _name(self, branch: str) -> str:
        """What a waiting branch called itself when it asked."""
        waits = next(iter(self._edges[branch].values()))
        wait = self.waits[waits[0]]
        assert isinstance(wait, Wait), "only a wait for a branch has an edge"
        return wait.sender

    def _model_failed(self, event: ModelFailed, recorded: Recorded) -> None:
        if event.wait_id is None:
            return
        assert event.deadline is not None, "a pause has its end"
        branch = ids.branch_of(event.wait_id)
        self.waits[event.wait_id] = Pause(branch, event.deadline, recorded.sequence)
        heapq.heappush(self._deadlines, (event.deadline, event.wait_id))

    # -- turns -------------------------------------------------------------------------------

    def _requested(self, event: TurnRequested, recorded: Recorded) -> None:
        turn = _Runnable(event.turn_id, 1, recorded.sequence)
        self._queues[0 if event.interactive else 1].push(turn)
        self._admit()

    def _resumed(self, event: TurnResumed, recorded: Recorded) -> None:
        self._queues[0].push(_Runnable(event.turn_id, event.n, recorded.sequence))
        self._admit()

    def _suspended(self, event: TurnSuspended, recorded: Recorded) -> None:
        self._free(event.turn_id)

    def _ended(self, event: TurnEnded, recorded: Recorded) -> None:
        self._free(event.turn_id)
        for queue in self._queues:
            queue.discard(event.turn_id)
        source = ids.branch_of(event.turn_id)
        for message in event.answered:
            self._open(Answer(("answer", message), source, recorded.sequence, message))

    def _free(self, turn_id: str) -> None:
        turn = self.admitted.pop(turn_id, None)
        if turn is not None:
            self.effects.pop(("offer", turn_id), None)
            self._admit()

    def _admit(self) -> None:
        while len(self.admitted) < self._limit:
            turn = self._queues[0].pop() or self._queues[1].pop()
            if turn is None:
                return
            self.admitted[turn.turn_id] = turn
            self._open(
                Offer(
                    ("offer", turn.turn_id),
                    turn.turn_id,
                    turn.sequence,
                    turn.turn_id,
                    turn.n,
                )
            )

    def _open(self, effect: Effect) -> None:
        self.effects[effect.key] = effect
        self.opened.append(effect)


class _FairQueue:
    """One turn of each session in rotation; within a session in the log's order."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, OrderedDict[str, _Runnable]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

    def push(self, turn: _Runnable) -> None:
        session = ids.session_of(turn.turn_id)
        self._sessions.setdefault(session, OrderedDict())[turn.turn_id] = turn

    def pop(self) -> _Runnable | None:
        if not self._sessions:
            return None
        session, turns = next(iter(self._sessions.items()))
        _, turn = turns.popitem(last=False)
        if turns:
            self._sessions.move_to_end(session)
        else:
            del self._sessions[session]
        return turn

    def discard(self, turn_id: str) -> None:
        session = ids.session_of(turn_id)
        turns = self._sessions.get(session)
        if turns is not None and turns.pop(turn_id, None) is not None and not turns:
            del self._sessions[session]


_FOLD: dict[type, Callable[[Ledger, Any, Recorded], None]] = {
    MessageSent: Ledger._sent,
    MessageReceived: Ledger._received,
    MessageRefused: Ledger._refused,
    ModelFailed: Ledger._model_failed,
    WaitEnded: Ledger._wait_ended,
    ReplyLate: Ledger._late,
    TurnRequested: Ledger._requested,
    TurnResumed: Ledger._resumed,
    TurnSuspended: Ledger._suspended,
    TurnEnded: Ledger._ended,
}
