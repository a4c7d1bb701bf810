"""The state of a branch, without texts, and how events change it."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from plait.events import ids
from plait.events.errors import BranchArchived as Archived
from plait.events.errors import BranchMerged, UnknownBranch
from plait.events.limits import Limits
from plait.events.store import Recorded
from plait.events.types import (
    BranchArchived,
    BranchOpened,
    BranchRestored,
    Epoch,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    ModelFailed,
    NodesPlaced,
    Outcome,
    Pins,
    ReplyLate,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnRequested,
    TurnResumed,
    TurnStatus,
    TurnSuspended,
    WaitEnded,
)


class Entry(Struct, frozen=True):
    """A message in the inbox, or a placed one that no turn has read yet."""

    node_id: str
    root: str
    hops: int
    user: bool
    message_id: str | None
    turn_id: str | None  # the turn that it asks for
    wait: bool


class Turn(Struct, kw_only=True):
    """The branch's present turn. `calls` are those of the last answer that have no result yet;
    of them, `waits` (wait id → call) are suspended and the others still to be run. A wait without
    a call is the pause after a model call that failed."""

    id: str
    root: str
    status: str = "requested"  # running, suspended
    n: int = 1
    epoch: Epoch = (0, 0)
    node_id: str | None = None
    pins: Pins | None = None
    steps: int = 0
    failed: int = 0  # model calls without an answer
    failed_in_a_row: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    calls: dict[str, None] = field(default_factory=dict)
    waits: dict[str, str | None] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)  # its own, and the user's that it read
    hops: int = 0
    ran_ms: int = 0  # without waiting
    since_ms: int = 0

    def to_run(self) -> list[str]:
        """The calls that have neither a result nor a wait, in order."""
        waiting = set(self.waits.values())
        return [call for call in self.calls if call not in waiting]


class Wait(Struct, kw_only=True):
    """A wait of this branch; `call` None for a send by hand. A pause waits for no message."""

    message_id: str | None
    target: str | None
    call: str | None
    deadline: int
    outcome: Outcome | None = None
    late: bool = False


class Branch(Struct, kw_only=True):
    """The fold of a branch's subject, without texts."""

    id: str
    version: int = 0
    commands: dict[str, int] = field(default_factory=dict)  # command id → sequence, the last ones
    closing: dict[str, int] = field(default_factory=dict)  # all that archived, restored, cancelled
    exists: bool = False  # has opened
    archived: bool = False
    merged_into: str | None = None
    fork: str = ""
    tip: str = ""
    nodes: dict[str, str] = field(default_factory=dict)  # user, assistant → predecessor, in order
    assistants: dict[str, str] = field(default_factory=dict)  # assistant node → its turn
    turn: Turn | None = None
    ended: dict[str, TurnStatus] = field(default_factory=dict)
    inbox: dict[str, Entry] = field(default_factory=dict)  # by node id
    unread: list[Entry] = field(default_factory=list)  # placed since the last first claim
    owed: dict[str, None] = field(default_factory=dict)  # waiting messages that the turn answers
    carried_hops: int = 0  # of a turn that passed its debts on
    received: dict[str, str | None] = field(default_factory=dict)  # node id → turn asked for
    sequences: dict[str, int] = field(default_factory=dict)  # node or message id → its append
    settled: dict[str, None] = field(default_factory=dict)  # messages received or refused
    notes: dict[str, None] = field(default_factory=dict)
    waits: dict[str, Wait] = field(default_factory=dict)

    def done_at(self, command_id: str) -> int | None:
        """The append that carried this command out, as far as it is remembered: a message and
        a turn are recognised by their own ids, however old."""
        return self.commands.get(command_id) or self.closing.get(command_id)

    def has(self, node: str) -> bool:
        return node in self.nodes

    def turn_status(self, turn: str) -> str | None:
        if self.turn is not None and self.turn.id == turn:
            return self.turn.status
        return self.ended.get(turn)


def check_open(branch: Branch) -> None:
    """Raises when the branch takes no new messages."""
    if not branch.exists:
        raise UnknownBranch(branch.id)
    if branch.merged_into is not None:
        raise BranchMerged(branch.id, into=branch.merged_into)
    if branch.archived:
        raise Archived(branch.id)


def evolve(branch: Branch, recorded: Recorded, limits: Limits) -> None:
    at, sequence = recorded.append.at, recorded.sequence
    for event in recorded.append.events:
        _EVOLVE[type(event)](branch, event, at, sequence)
    command_id = recorded.append.command_id
    branch.commands[command_id] = sequence
    if len(branch.commands) > limits.command_ids:
        del branch.commands[next(iter(branch.commands))]
    branch.version = sequence
    if any(_is_closing(event) for event in recorded.append.events):
        branch.closing[command_id] = sequence


def _is_closing(event: object) -> bool:
    """What would act twice if its command came again: its event alone would not tell."""
    if isinstance(event, TurnEnded):
        return event.status == "cancelled"
    return isinstance(event, BranchArchived | BranchRestored)


def _opened(branch: Branch, event: BranchOpened, at: int, sequence: int) -> None:
    branch.exists = True
    branch.fork = branch.tip = event.fork


def _archived(branch: Branch, event: BranchArchived, at: int, sequence: int) -> None:
    branch.archived = True


def _restored(branch: Branch, event: BranchRestored, at: int, sequence: int) -> None:
    branch.archived = False


def _message_received(branch: Branch, event: MessageReceived, at: int, sequence: int) -> None:
    entry = Entry(
        event.node_id,
        event.root,
        event.hops,
        event.source == "user",
        event.message_id if event.source == "from_branch" else None,
        event.turn_id,
        event.wait,
    )
    branch.sequences[event.node_id] = sequence
    if event.source == "note":
        assert event.message_id is not None
        branch.notes[event.message_id] = None
    else:
        branch.received[event.node_id] = event.turn_id
        if event.message_id is not None:
            branch.settled[event.message_id] = None
    if event.after is None:
        branch.inbox[event.node_id] = entry
    else:
        _place(branch, entry, event.after)


def _place(branch: Branch, entry: Entry, after: str) -> None:
    branch.nodes[entry.node_id] = after
    branch.tip = entry.node_id
    branch.unread.append(entry)
    if entry.wait and entry.message_id is not None:
        branch.owed[entry.message_id] = None


def _message_refused(branch: Branch, event: MessageRefused, at: int, sequence: int) -> None:
    branch.inbox.pop(event.node_id, None)
    if event.message_id is not None:
        branch.settled[event.message_id] = None


def _nodes_placed(branch: Branch, event: NodesPlaced, at: int, sequence: int) -> None:
    after = event.after
    for node in event.node_ids:
        _place(branch, branch.inbox.pop(node), after)
        after = node


def _turn_requested(branch: Branch, event: TurnRequested, at: int, sequence: int) -> None:
    branch.turn = Turn(id=event.turn_id, root=event.root)
    branch.sequences[event.turn_id] = sequence


def _turn_claimed(branch: Branch, event: TurnClaimed, at: int, sequence: int) -> None:
    turn = branch.turn
    assert turn is not None
    turn.status, turn.epoch, turn.since_ms = "running", event.epoch, at
    if event.after is None:
        return
    turn.node_id, turn.pins = event.node_id, event.pins
    turn.hops = max([branch.carried_hops, *(entry.hops for entry in branch.unread)])
    turn.nodes = [entry.node_id for entry in branch.unread if entry.user]
    turn.nodes.append(event.node_id)
    branch.carried_hops = 0
    branch.unread.clear()
    branch.nodes[event.node_id] = event.after
    branch.assistants[event.node_id] = turn.id
    branch.tip = event.node_id


def _ran(turn: Turn, at: int) -> None:
    turn.ran_ms += max(0, at - turn.since_ms)
    turn.since_ms = at


def _model_answered(branch: Branch, event: ModelAnswered, at: int, sequence: int) -> None:
    turn = branch.turn
    assert turn is not None
    _ran(turn, at)
    turn.steps, turn.failed_in_a_row = event.step, 0
    turn.output_tokens += event.usage.output_tokens
    turn.total_tokens += event.usage.input_tokens + event.usage.output_tokens
    for call in event.calls:
        turn.calls[call.node_id] = None
        turn.nodes.append(call.node_id)


def _model_failed(branch: Branch, event: ModelFailed, at: int, sequence: int) -> None:
    turn = branch.turn
    assert turn is not None
    _ran(turn, at)
    turn.failed, turn.failed_in_a_row = event.nth, turn.failed_in_a_row + 1
    if event.wait_id is not None:
        assert event.deadline is not None, "a pause has its end"
        branch.waits[event.wait_id] = Wait(
            message_id=None, target=None, call=None, deadline=event.deadline
        )
        turn.waits[event.wait_id] = None


def _tool_returned(branch: Branch, event: ToolReturned, at: int, sequence: int) -> None:
    turn = branch.turn
    assert turn is not None
    _ran(turn, at)
    turn.calls.pop(event.node_id, None)


def _turn_suspended(branch: Branch, event: TurnSuspended, at: int, sequence: int) -> None:
    assert branch.turn is not None
    _ran(branch.turn, at)
    branch.turn.status = "suspended"


def _turn_resumed(branch: Branch, event: TurnResumed, at: int, sequence: int) -> None:
    assert branch.turn is not None
    branch.turn.status, branch.turn.n = "requested", event.n


def _turn_ended(branch: Branch, event: TurnEnded, at: int, sequence: int) -> None:
    turn = branch.turn
    assert turn is not None
    branch.ended[event.turn_id] = event.status
    branch.turn = None
    for message in event.answered:
        branch.owed.pop(message, None)
    if event.passed:
        # A turn that never ran has read nothing, and hands on what it was passed itself.
        branch.carried_hops = max(branch.carried_hops, turn.hops)
    if event.dropped and turn.node_id is None:
        branch.unread = [entry for entry in branch.unread if entry.node_id not in event.dropped]


def _message_sent(branch: Branch, event: MessageSent, at: int, sequence: int) -> None:
    branch.sequences[event.message_id] = sequence
    if event.deadline is None:
        return
    wait = ids.wait_id(event.message_id)
    branch.waits[wait] = Wait(
        message_id=event.message_id,
        target=event.target,
        call=event.call,
        deadline=event.deadline,
    )
    if event.call is not None and branch.turn is not None:
        branch.turn.waits[wait] = event.call


def _wait_ended(branch: Branch, event: WaitEnded, at: int, sequence: int) -> None:
    branch.waits[event.wait_id].outcome = event.outcome
    turn = branch.turn
    if turn is not None:
        call = turn.waits.pop(event.wait_id, None)
        if call is not None:
            turn.calls.pop(call, None)


def _reply_late(branch: Branch, event: ReplyLate, at: int, sequence: int) -> None:
    branch.waits[event.wait_id].late = True


_EVOLVE: dict[type, Callable[[Branch, Any, int, int], None]] = {
    BranchOpened: _opened,
    BranchArchived: _archived,
    BranchRestored: _restored,
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
