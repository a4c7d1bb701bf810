"""Events → what is written to a session's keys, and nodes → lines: pure.

Each event is folded into blind writes: it carries what it needs, nothing is read back. So any
run of appends gives one set of writes, in which the last value of a field wins.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from plait.events import ids
from plait.events.errors import UnknownEvent
from plait.events.store import Recorded, seq_of
from plait.events.types import (
    BranchArchived,
    BranchNamed,
    BranchOpened,
    BranchRestored,
    Content,
    HeadMoved,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    ModelFailed,
    NodesPlaced,
    Outcome,
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
from plait.projections.schema import (
    HEAD,
    NODES,
    SESSION,
    BranchField,
    EndRow,
    FailureRow,
    HeadRow,
    Key,
    Mark,
    MessageField,
    NodeRow,
    OpenedRow,
    OutcomeRow,
    PlaceRow,
    RefusedRow,
    ResultRow,
    Row,
    SentRow,
    SessionRow,
    StepRow,
    TurnField,
    args_of,
    failure_of,
    field,
    late_of,
)

Value = Row | Content | str | int | None


class Writes:
    """What the appends from `first` to `last` write to the keys of one session."""

    def __init__(self, session: str) -> None:
        self.session = session
        self._own = session + "-"
        self.first = self.last = 0
        self.put: defaultdict[Key, dict[str, Value]] = defaultdict(dict)
        self.once: defaultdict[Key, dict[str, Value]] = defaultdict(dict)  # unless it is there
        self.add: defaultdict[Key, dict[str, int]] = defaultdict(dict)
        self.rank: defaultdict[Key, dict[str, int]] = defaultdict(dict)  # into a sorted set

    def covers(self, sequence: int) -> None:
        self.first = self.first or sequence
        self.last = sequence

    def set(self, key: Key, name: str, value: Value) -> None:
        self.put[key][name] = value
        if key in self.once:
            self.once[key].pop(name, None)

    def set_once(self, key: Key, name: str, value: Value) -> None:
        if key not in self.put or name not in self.put[key]:
            self.once[key].setdefault(name, value)

    def count(self, key: Key, name: str) -> None:
        counts = self.add[key]
        counts[name] = counts.get(name, 0) + 1

    def short(self, any_id: str) -> str:
        """As `schema.short`; this one is on the way of every event."""
        return any_id[len(self._own) :] if any_id.startswith(self._own) else any_id


class _Spot(NamedTuple):
    """Where an event stands."""

    branch: str  # its short name
    at: int
    seq: int


def fold(recorded: Recorded, writes: Writes) -> None:
    """Adds what one append of the session writes. Raises UnknownEvent."""
    stream, sequence, append = recorded
    writes.covers(sequence)
    for index, event in enumerate(append.events):
        write = _FOLD.get(type(event))
        if write is None:
            raise UnknownEvent(
                f"{type(event).__name__} at {sequence}.{index} is not known to these projections: "
                "upgrade them"
            )
        write(writes, event, _Spot(stream.branch, append.at, seq_of(sequence, index)))


def creates_session(recorded: Recorded) -> bool:
    return isinstance(recorded.append.events[0], SessionCreated)


def fold_tenant(recorded: Recorded, writes: Writes) -> None:
    """Adds what an append that creates a session writes to its tenant's list."""
    writes.covers(recorded.sequence)
    writes.rank[Key.SESSIONS][recorded.stream.session] = recorded.sequence


# -- lines -----------------------------------------------------------------------------------


class Placed(NamedTuple):
    """What lines are drawn from: whole ids."""

    id: str
    branch: str
    predecessor: str | None
    caller: str | None
    from_node: str | None


class Line(NamedTuple):
    kind: Literal["chain", "fork", "communication", "call"]
    start: str
    end: str


def lines(nodes: Iterable[Placed]) -> list[Line]:
    """Lines between nodes, which come in their order, ROOT first. The first branch goes on from
    ROOT as its chain; a calling node that is not among the nodes (of another session) has none."""
    found: list[Line] = []
    branches: dict[str, str] = {}
    root, begun = "", False
    for node in nodes:
        root = root or node.id
        branches[node.id] = node.branch
        before = node.predecessor
        if before is not None:
            first = before == root and not begun
            begun = begun or first
            inside = first or branches.get(before) == node.branch
            found.append(Line("chain" if inside else "fork", before, node.id))
        if node.caller is not None:
            found.append(Line("call", node.caller, node.id))
        if node.from_node is not None and node.from_node in branches:
            found.append(Line("communication", node.from_node, node.id))
    return found


# -- the session's own subject ---------------------------------------------------------------


def _session_created(w: Writes, event: SessionCreated, spot: _Spot) -> None:
    root = w.short(ids.root_id(w.session))
    w.set(Key.META, SESSION, SessionRow(event.title, event.model, event.attended, spot.at))
    w.set(Key.META, HEAD, HeadRow(w.short(event.branch_id), root))
    w.set(Key.NODES, root, NodeRow("root", spot.at, spot.seq))
    w.count(Key.META, NODES)


def _head_moved(w: Writes, event: HeadMoved, spot: _Spot) -> None:
    fork = None if event.fork is None else w.short(event.fork)
    w.set(Key.META, HEAD, HeadRow(w.short(event.branch_id), fork))


def _branch_named(w: Writes, event: BranchNamed, spot: _Spot) -> None:
    w.set(Key.BRANCHES, field(w.short(event.branch_id), BranchField.NAME), event.name)


# -- a branch: opening and closing -----------------------------------------------------------


def _branch_opened(w: Writes, event: BranchOpened, spot: _Spot) -> None:
    fork = w.short(event.fork)
    w.set(Key.BRANCHES, field(spot.branch, BranchField.OPENED), OpenedRow(fork, spot.seq))
    w.set(Key.BRANCHES, field(spot.branch, BranchField.HEAD), fork)


def _branch_archived(w: Writes, event: BranchArchived, spot: _Spot) -> None:
    w.set(Key.BRANCHES, field(spot.branch, BranchField.ARCHIVED), True)


def _branch_restored(w: Writes, event: BranchRestored, spot: _Spot) -> None:
    w.set(Key.BRANCHES, field(spot.branch, BranchField.ARCHIVED), False)


# -- a branch: its inbox ---------------------------------------------------------------------


def _message_received(w: Writes, event: MessageReceived, spot: _Spot) -> None:
    node = w.short(event.node_id)
    turn = None if event.turn_id is None else w.short(event.turn_id)
    placed = event.after is not None
    w.set(
        Key.NODES,
        node,
        NodeRow(
            role="user",
            at=spot.at,
            seq=spot.seq if placed else None,
            predecessor=None if event.after is None else w.short(event.after),
            turn=turn,
            source=event.source,
            from_node=None if event.from_node is None else w.short(event.from_node),
            sender=event.sender,
        ),
    )
    w.set(Key.TEXTS, node, event.content)
    if turn is not None:
        # The turn of a message that waits is pending: its own events come later.
        w.set_once(Key.TURNS, field(turn, TurnField.STATE), "requested")
        w.set_once(Key.TURNS, field(turn, TurnField.ASKED), node)
    if event.message_id is not None and event.source == "from_branch":
        message = w.short(event.message_id)
        w.set(Key.MESSAGES, field(message, MessageField.DELIVERED), Mark(spot.at, spot.seq))
    if placed:
        _tip(w, spot.branch, node)


def _tip(w: Writes, branch: str, node: str) -> None:
    w.set(Key.BRANCHES, field(branch, BranchField.HEAD), node)
    _counted(w, branch)


def _counted(w: Writes, branch: str) -> None:
    w.count(Key.BRANCHES, field(branch, BranchField.NODES))
    w.count(Key.META, NODES)


def _message_refused(w: Writes, event: MessageRefused, spot: _Spot) -> None:
    w.set(Key.RESULTS, w.short(event.node_id), ResultRow("refused", event.reason))
    if event.message_id is not None:
        w.set(
            Key.MESSAGES,
            field(w.short(event.message_id), MessageField.REFUSED),
            RefusedRow(spot.at, spot.seq, event.reason),
        )


def _nodes_placed(w: Writes, event: NodesPlaced, spot: _Spot) -> None:
    before = w.short(event.after)
    for nth, node_id in enumerate(event.node_ids):
        node = w.short(node_id)
        w.set(Key.PLACES, node, PlaceRow(spot.seq, nth, before))
        _tip(w, spot.branch, node)
        before = node


# -- a branch: turns -------------------------------------------------------------------------


def _turn_requested(w: Writes, event: TurnRequested, spot: _Spot) -> None:
    turn = w.short(event.turn_id)
    w.set(Key.TURNS, field(turn, TurnField.STATE), "requested")
    w.set(Key.BRANCHES, field(spot.branch, BranchField.TURN), turn)


def _turn_claimed(w: Writes, event: TurnClaimed, spot: _Spot) -> None:
    turn, node = w.short(event.turn_id), w.short(event.node_id)
    w.set(Key.TURNS, field(turn, TurnField.STATE), "running")
    if event.after is None:
        return  # The first claim placed the node.
    w.set(Key.TURNS, field(turn, TurnField.NODE), node)
    w.set(
        Key.NODES,
        node,
        NodeRow("assistant", spot.at, spot.seq, predecessor=w.short(event.after), turn=turn),
    )
    _tip(w, spot.branch, node)
    for message_id in event.consumed:
        message = w.short(message_id)
        w.set_once(Key.MESSAGES, field(message, MessageField.CONSUMED), Mark(spot.at, spot.seq))


def _model_answered(w: Writes, event: ModelAnswered, spot: _Spot) -> None:
    turn = w.short(event.turn_id)
    for nth, call in enumerate(event.calls):
        node = w.short(call.node_id)
        w.set(
            Key.NODES,
            node,
            NodeRow("tool", spot.at, spot.seq, nth, turn=turn, name=call.name),
        )
        w.set(Key.TEXTS, args_of(node), call.args)
        _counted(w, spot.branch)
    usage = event.usage
    w.set(
        Key.TURNS,
        field(turn, event.step),
        StepRow(
            context=event.context,
            finish=event.finish,
            calls=tuple(w.short(call.node_id) for call in event.calls),
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            text=event.text,
        ),
    )
    w.set(Key.TURNS, field(turn, TurnField.LAST), event.step)


def _model_failed(w: Writes, event: ModelFailed, spot: _Spot) -> None:
    turn, error = w.short(event.turn_id), event.error
    row = FailureRow(event.step, event.context, error.code, error.message, event.deadline)
    w.set(Key.TURNS, failure_of(turn, event.nth), row)
    w.set(Key.TURNS, field(turn, TurnField.FAILED), event.nth)


def _tool_returned(w: Writes, event: ToolReturned, spot: _Spot) -> None:
    node = w.short(event.node_id)
    w.set(Key.RESULTS, node, ResultRow(event.status))
    w.set(Key.TEXTS, node, event.result)


def _turn_suspended(w: Writes, event: TurnSuspended, spot: _Spot) -> None:
    w.set(Key.TURNS, field(w.short(event.turn_id), TurnField.STATE), "suspended")


def _turn_resumed(w: Writes, event: TurnResumed, spot: _Spot) -> None:
    w.set(Key.TURNS, field(w.short(event.turn_id), TurnField.STATE), "requested")


def _turn_ended(w: Writes, event: TurnEnded, spot: _Spot) -> None:
    error = event.error
    w.set(Key.BRANCHES, field(spot.branch, BranchField.TURN), None)  # Only the present one ends.
    w.set(
        Key.ENDS,
        w.short(event.turn_id),
        EndRow(event.status) if error is None else EndRow(event.status, error.code, error.message),
    )


# -- a branch: messages that it sends, and what it waits for ---------------------------------


def _message_sent(w: Writes, event: MessageSent, spot: _Spot) -> None:
    message = w.short(event.message_id)
    w.set(
        Key.MESSAGES,
        field(message, MessageField.SENT),
        SentRow(w.short(event.target), w.short(event.from_node), event.deadline, spot.at, spot.seq),
    )
    w.set(Key.TEXTS, message, event.content)
    if event.call is not None and event.deadline is not None:
        w.set(Key.MESSAGES, w.short(event.call), message)


_RESULT_OF: dict[Outcome, str] = {"replied": "completed", "cancelled": "cancelled"}


def _wait_ended(w: Writes, event: WaitEnded, spot: _Spot) -> None:
    if ids.of_kind(event.wait_id, "pause") is not None:
        return  # It waited for no message.
    message = w.short(ids.message_of(event.wait_id))
    text = w.short(event.wait_id)
    if event.call is not None:
        text = w.short(event.call)
        status = _RESULT_OF.get(event.outcome, "error")
        w.set(Key.RESULTS, text, ResultRow(status, None if event.content else event.reason))
    _outcome(w, field(message, MessageField.OUTCOME), event, text, spot)


def _reply_late(w: Writes, event: ReplyLate, spot: _Spot) -> None:
    message = w.short(ids.message_of(event.wait_id))
    _outcome(w, field(message, MessageField.LATE), event, late_of(message), spot)


def _outcome(w: Writes, name: str, event: WaitEnded | ReplyLate, text: str, spot: _Spot) -> None:
    if event.content is not None:
        w.set(Key.TEXTS, text, event.content)
    w.set(
        Key.MESSAGES,
        name,
        OutcomeRow(
            outcome=event.outcome,
            at=spot.at,
            seq=spot.seq,
            node=None if event.reply_node is None else w.short(event.reply_node),
            reason=event.reason,
            text=None if event.content is None else text,
        ),
    )


_FOLD: dict[type, Callable[[Writes, Any, _Spot], None]] = {
    SessionCreated: _session_created,
    HeadMoved: _head_moved,
    BranchNamed: _branch_named,
    BranchOpened: _branch_opened,
    BranchArchived: _branch_archived,
    BranchRestored: _branch_restored,
    MessageReceived: _message_received,
    MessageRefused: _message_refused,
    NodesPlaced: _nodes_placed,
    TurnRequested: _turn_requested,
    TurnClaimed: _turn_claimed,
    ModelAnswered: _model_answered,
    ModelFailed: _model_failed,
    ToolReturned: _tool_returned,
    TurnSuspended: _turn_suspended,
    TurnResumed: _turn_resumed,
    TurnEnded: _turn_ended,
    MessageSent: _message_sent,
    WaitEnded: _wait_ended,
    ReplyLate: _reply_late,
}
