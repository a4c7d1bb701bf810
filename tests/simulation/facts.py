"""What the log says, folded a second time and on purpose differently from the code under test:
whole histories instead of the present state, so that the invariants can ask when and how often."""

import random

from msgspec import Struct, field

from plait.events import ids
from plait.events.context import Transcript, fold
from plait.events.store import Recorded
from plait.events.types import (
    AnyEvent,
    BranchArchived,
    BranchNamed,
    BranchOpened,
    BranchRestored,
    Content,
    Epoch,
    HeadMoved,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    ModelFailed,
    NodesPlaced,
    ReplyLate,
    SessionCreated,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnRequested,
    TurnResumed,
    TurnSuspended,
    WaitEnded,
)


class SessionFacts(Struct):
    id: str
    tenant: str
    sequence: int
    created: SessionCreated
    heads: list[tuple[int, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # branch → name
    named: list[tuple[int, str, str | None]] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)


class Received(Struct):
    """A message on the branch that got it. `tip`: what its branch ended with then."""

    event: MessageReceived
    branch: str
    sequence: int
    tip: str
    command_id: str


class TurnFacts(Struct):
    id: str
    branch: str
    requested: int
    n: int = 1
    status: str = "requested"
    epoch: Epoch = (0, 0)
    worker: str = ""
    claimed: int = 0  # the sequence of its newest claim
    node: str = ""
    hops: int = 0
    steps: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # call → sequence of its result, 0: none
    failed: int = 0  # model calls
    waits: dict[str, str | None] = field(default_factory=dict)  # open wait → call; pause → None
    ended: TurnEnded | None = None
    ended_at: int = 0
    text: Content | None = None


class MessageFacts(Struct):
    sent: MessageSent
    branch: str
    sequence: int
    nth: int  # among those of its branch
    received: int = 0
    refused: MessageRefused | None = None
    refused_at: int = 0
    consumed: int = 0
    answered: list[str] = field(default_factory=list)  # turns
    notes: int = 0
    closes_cycle: bool = False


class WaitFacts(Struct):
    """Of a message, or the pause of a turn: that has no message, no target and no call."""

    message: str | None
    branch: str
    target: str | None
    call: str | None
    deadline: int
    ended: WaitEnded | None = None
    late: int = 0


class BranchFacts(Struct):
    id: str
    opened: int
    fork: str
    tip: str
    nodes: list[str] = field(default_factory=list)
    arrivals: dict[str, MessageReceived] = field(default_factory=dict)  # not placed yet, in order
    unread_hops: list[int] = field(default_factory=list)
    carried_hops: int = 0
    owed: dict[str, None] = field(default_factory=dict)
    turn: TurnFacts | None = None
    busy: list[tuple[int, bool]] = field(default_factory=list)
    archived: list[tuple[int, bool]] = field(default_factory=list)
    transcript: Transcript = field(default_factory=Transcript)

    @property
    def closed(self) -> bool:
        return bool(self.archived) and self.archived[-1][1]


class Facts:
    def __init__(self) -> None:
        self.end = 0
        self.sessions: dict[str, SessionFacts] = {}
        self.branches: dict[str, BranchFacts] = {}
        self.placed: dict[str, str] = {}  # node → branch; tool nodes as well
        self.received: dict[str, Received] = {}
        self.refused: dict[str, int] = {}  # node id of a refused message → sequence
        self.turns: dict[str, TurnFacts] = {}
        self.messages: dict[str, MessageFacts] = {}
        self.waits: dict[str, WaitFacts] = {}
        self.open_waits: dict[str, None] = {}
        self.commands: dict[tuple[str, str, str], int] = {}  # stream, command → sequence
        self.by_command: dict[str, list[AnyEvent]] = {}
        self.sent_by: dict[str, int] = {}

    def fold(self, recorded: Recorded) -> None:
        stream, sequence, append = recorded
        self.end = sequence
        branch_id = f"{stream.session}-{stream.branch}"
        self.commands[stream.session, stream.branch, append.command_id] = sequence
        self.by_command.setdefault(append.command_id, []).extend(append.events)
        if stream.branch == ids.SESSION_TOKEN:
            for event in append.events:
                self._session(stream.tenant, stream.session, event, sequence)
            return
        for event in append.events:
            self._branch(branch_id, event, sequence, append.command_id)
        fold(self.branches[branch_id].transcript, recorded)

    def tenant_of(self, any_id: str) -> str | None:
        session = self.sessions.get(ids.session_of(any_id))
        return None if session is None else session.tenant

    def path(self, start: str, goal: str) -> bool:
        """Whether branch `start` waits for `goal`, directly or through others."""
        seen, left = {start}, [start]
        while left:
            branch = left.pop()
            if branch == goal:
                return True
            for wait_id in self.open_waits:
                wait = self.waits[wait_id]
                if wait.branch != branch or wait.call is None or wait.target in seen:
                    continue
                assert wait.message is not None and wait.target is not None
                if not self.messages[wait.message].closes_cycle:
                    seen.add(wait.target)
                    left.append(wait.target)
        return False

    def some_address(
        self, chance: random.Random, session_id: str | None, worker: str | None = None
    ) -> str:
        """A branch as somebody in that session might name it; now and then one that is not
        there, or another tenant's. For a model's own: seldom the one that it runs on."""
        drawn = chance.random()
        tenant = self.tenant_of(session_id or "")
        branches = [
            b
            for b in self.branches.values()
            if drawn < 0.03
            or ids.session_of(b.id) == session_id
            or (drawn < 0.35 and self.tenant_of(b.id) == tenant)
        ]
        if worker is not None and drawn > 0.1:
            branches = [b for b in branches if b.turn is None or b.turn.worker != worker]
        if drawn > 0.97 or not branches:
            return chance.choice(("nowhere", "alpha", "be", "gamma"))
        branch = chance.choice(branches)
        session = self.sessions[ids.session_of(branch.id)]
        name = session.names.get(branch.id)
        if name is not None and chance.random() < 0.6:
            return name if session.id == session_id else f"{session.id}:{name}"
        if branch.nodes and chance.random() < 0.15:
            return chance.choice(branch.nodes)
        return branch.id

    # -- events ------------------------------------------------------------------------------

    def _session(self, tenant: str, session_id: str, event: AnyEvent, sequence: int) -> None:
        match event:
            case SessionCreated():
                facts = SessionFacts(session_id, tenant, sequence, event)
                facts.heads.append((sequence, event.branch_id))
                self.sessions[session_id] = facts
                self.placed[ids.root_id(session_id)] = f"{session_id}-_"
            case HeadMoved():
                self.sessions[session_id].heads.append((sequence, event.branch_id))
            case BranchNamed():
                names = self.sessions[session_id].names
                names.pop(event.branch_id, None)
                if event.name is not None:
                    names[event.branch_id] = event.name
                self.sessions[session_id].named.append((sequence, event.branch_id, event.name))
            case _:
                raise AssertionError(event)

    def _branch(self, branch_id: str, event: AnyEvent, sequence: int, command_id: str) -> None:
        if isinstance(event, BranchOpened):
            self.branches[branch_id] = BranchFacts(branch_id, sequence, event.fork, event.fork)
            self.sessions[ids.session_of(branch_id)].branches.append(branch_id)
            return
        branch = self.branches[branch_id]
        match event:
            case BranchArchived():
                branch.archived.append((sequence, True))
            case BranchRestored():
                branch.archived.append((sequence, False))
            case MessageReceived():
                self.received[event.node_id] = Received(
                    event, branch_id, sequence, branch.tip, command_id
                )
                branch.arrivals[event.node_id] = event
                if event.source == "from_branch":
                    self.messages[event.message_id or ""].received = sequence
                elif event.source == "note":
                    self.messages[event.message_id or ""].notes += 1
                if event.after is not None:
                    self._placed(branch, event.node_id)
            case NodesPlaced():
                for node in event.node_ids:
                    self._placed(branch, node)
            case MessageRefused():
                branch.arrivals.pop(event.node_id, None)
                self.refused[event.node_id] = sequence
                if event.message_id is not None:
                    message = self.messages[event.message_id]
                    message.refused, message.refused_at = event, sequence
            case TurnRequested():
                turn = TurnFacts(event.turn_id, branch_id, sequence)
                branch.turn = self.turns[event.turn_id] = turn
                branch.busy.append((sequence, True))
            case MessageSent():
                self._sent(branch_id, event, sequence)
            case WaitEnded():
                self._wait_ended(event, sequence)
            case ReplyLate():
                self.waits[event.wait_id].late += 1
            case _:
                self._turn(branch, event, sequence)

    def _turn(self, branch: BranchFacts, event: AnyEvent, sequence: int) -> None:
        turn = self.turns[getattr(event, "turn_id")]  # noqa: B009 - what is left here has one
        match event:
            case TurnClaimed():
                turn.status, turn.epoch, turn.worker = "running", event.epoch, event.worker
                turn.claimed = sequence
                if event.after is not None:
                    turn.node = event.node_id
                    turn.hops = max([branch.carried_hops, *branch.unread_hops])
                    branch.unread_hops.clear()
                    branch.carried_hops = 0
                    branch.tip = event.node_id
                    branch.nodes.append(event.node_id)
                    self.placed[event.node_id] = branch.id
                for message in event.consumed:
                    facts = self.messages[message]
                    facts.consumed = facts.consumed or sequence
            case ModelAnswered():
                turn.steps, turn.text = event.step, event.text
                turn.calls |= dict.fromkeys((call.node_id for call in event.calls), 0)
                for call in event.calls:
                    self.placed[call.node_id] = branch.id
            case ModelFailed():
                turn.failed = event.nth
                if event.wait_id is not None:
                    turn.waits[event.wait_id] = None
                    self.waits[event.wait_id] = WaitFacts(
                        None, branch.id, None, None, event.deadline or 0
                    )
                    self.open_waits[event.wait_id] = None
            case ToolReturned():
                turn.calls[event.node_id] = sequence
            case TurnSuspended():
                turn.status = "suspended"
            case TurnResumed():
                turn.status, turn.n = "requested", event.n
            case TurnEnded():
                turn.status, turn.ended, turn.ended_at = event.status, event, sequence
                branch.turn = None
                branch.busy.append((sequence, False))
                for message in event.answered:
                    self.messages[message].answered.append(event.turn_id)
                    branch.owed.pop(message, None)
                if event.passed:
                    branch.carried_hops = max(branch.carried_hops, turn.hops)
            case _:
                raise AssertionError(event)

    def _placed(self, branch: BranchFacts, node: str) -> None:
        event = branch.arrivals.pop(node)
        branch.tip = node
        branch.nodes.append(node)
        branch.unread_hops.append(event.hops)
        self.placed[node] = branch.id
        if event.wait and event.message_id is not None:
            branch.owed[event.message_id] = None

    def _sent(self, branch_id: str, event: MessageSent, sequence: int) -> None:
        nth = self.sent_by[branch_id] = self.sent_by.get(branch_id, 0) + 1
        message = MessageFacts(event, branch_id, sequence, nth)
        self.messages[event.message_id] = message
        if event.deadline is None:
            return
        wait_id = ids.wait_id(event.message_id)
        if event.call is not None:
            message.closes_cycle = self.path(event.target, branch_id)
            self.turns[self._turn_of(branch_id)].waits[wait_id] = event.call
        self.waits[wait_id] = WaitFacts(
            event.message_id, branch_id, event.target, event.call, event.deadline
        )
        self.open_waits[wait_id] = None

    def _wait_ended(self, event: WaitEnded, sequence: int) -> None:
        wait = self.waits[event.wait_id]
        wait.ended = event
        self.open_waits.pop(event.wait_id, None)
        turn = self.branches[wait.branch].turn
        call = turn.waits.pop(event.wait_id, None) if turn is not None else None
        if turn is not None and call is not None:
            turn.calls[call] = sequence

    def _turn_of(self, branch_id: str) -> str:
        turn = self.branches[branch_id].turn
        assert turn is not None, "a call that waits belongs to a turn"
        return turn.id
