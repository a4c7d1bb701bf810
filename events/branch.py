"""A branch: its inbox, its turns, what it sends and waits for. Pure: decide and evolve.

    requested → running ⇄ suspended → completed | error | cancelled

`decide` looks only at structure, never at texts. `evolve` folds in place: a state has one owner.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

from msgspec import Struct, field

from plait.events import ids
from plait.events.commands import (
    AnyBranchCommand,
    ArchiveBranch,
    CancelTurn,
    ClaimTurn,
    DeliverMessage,
    DeliverNote,
    EndWait,
    FailTurn,
    PostMessage,
    RecordAnswer,
    RecordResults,
    RequestTurn,
    SendMessage,
)
from plait.events.errors import (
    BranchArchived as Archived,
)
from plait.events.errors import (
    BranchBusy,
    BranchMerged,
    BrokenEdge,
    BudgetExceeded,
    InboxFull,
    Invalid,
    NotATip,
    PlaitError,
    SelfSend,
    StaleClaim,
    TurnAlreadyEnded,
    UnknownBranch,
    UnknownTurn,
)
from plait.events.limits import Limits
from plait.events.session import remember
from plait.events.store import Recorded
from plait.events.types import (
    BranchArchived,
    BranchEvent,
    BranchOpened,
    BranchRestored,
    Epoch,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    NodesPlaced,
    Outcome,
    Pins,
    ReplyLate,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnError,
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
    of them, `waits` (wait id → call) are suspended and the others still to be run."""

    id: str
    root: str
    status: str = "requested"  # running, suspended
    n: int = 1
    epoch: Epoch = (0, 0)
    node_id: str | None = None
    pins: Pins | None = None
    steps: int = 0
    calls: dict[str, None] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)  # its own, and the user's that it read
    hops: int = 0
    ran_ms: int = 0  # without waiting
    since_ms: int = 0

    def to_run(self) -> list[str]:
        """The calls that have neither a result nor a wait, in order."""
        waiting = set(self.waits.values())
        return [call for call in self.calls if call not in waiting]


class Wait(Struct, kw_only=True):
    """A wait of this branch; `call` None for a send by hand."""

    message_id: str
    target: str
    call: str | None
    deadline: int
    outcome: Outcome | None = None
    late: bool = False


class Branch(Struct, kw_only=True):
    """The fold of a branch's subject, without texts."""

    id: str
    version: int = 0
    commands: dict[str, int] = field(default_factory=dict)
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

    def has(self, node: str) -> bool:
        return node in self.nodes

    def turn_status(self, turn: str) -> str | None:
        if self.turn is not None and self.turn.id == turn:
            return self.turn.status
        return self.ended.get(turn)


# -- decide ----------------------------------------------------------------------------------


def decide(command: AnyBranchCommand, branch: Branch, limits: Limits) -> Sequence[BranchEvent]:
    """Raises a PlaitError that says what to do; an empty answer: it was done before."""
    if command.command_id in branch.commands:
        return []
    match command:
        case PostMessage():
            return _post(command, branch, limits)
        case RequestTurn():
            return _request_turn(command, branch)
        case SendMessage():
            return _send_by_hand(command, branch, limits)
        case CancelTurn():
            return _cancel(command, branch)
        case ArchiveBranch():
            return _archive(command, branch)
        case ClaimTurn():
            return _claim(command, branch)
        case RecordAnswer():
            return _record_answer(command, branch, limits)
        case RecordResults():
            return _record_results(command, branch, limits)
        case FailTurn():
            _fenced(branch, command.turn_id, command.epoch)
            return _end_turn(branch, "error", error=command.error)
        case DeliverMessage():
            return _deliver(command, branch, limits)
        case DeliverNote():
            return _deliver_note(command, branch)
        case EndWait():
            return _end_wait(command, branch)
        case _:
            assert_never(command)


def check_open(branch: Branch) -> None:
    """Raises when the branch takes no new messages."""
    if not branch.exists:
        raise UnknownBranch(branch.id)
    if branch.merged_into is not None:
        raise BranchMerged(branch.id, into=branch.merged_into)
    if branch.archived:
        raise Archived(branch.id)


def check_send(branch: Branch, target: str, hops: int, limits: Limits) -> None:
    """What refuses a send before it is recorded: oneself, and a chain that is too long (P16)."""
    if target == branch.id:
        raise SelfSend(branch.id)
    if hops > limits.chain_hops:
        raise BudgetExceeded("messages in this chain of branches", hops, limits.chain_hops)


def _post(command: PostMessage, branch: Branch, limits: Limits) -> list[BranchEvent]:
    node = ids.node_id(branch.id, command.command_id)
    if node in branch.received:
        return []
    events: list[BranchEvent] = []
    tip = branch.tip
    if not branch.exists and command.fork is not None:
        events.append(_opening(branch, command.fork))
        tip = command.fork
    else:
        check_open(branch)
    if command.expected_tip is not None and tip != command.expected_tip:
        raise NotATip(command.expected_tip, tip)
    stopping = command.strategy in ("interrupt", "rollback")
    if stopping and not command.run:
        raise Invalid(f"{command.strategy} goes on with the new input: it needs run=true")
    turn = branch.turn
    if turn is not None and command.strategy == "reject":
        raise BranchBusy(branch.id, turn.id)
    entry = Entry(
        node_id=node,
        root=command.root or command.command_id,
        hops=0,
        user=True,
        message_id=None,
        turn_id=_turn_for(branch, command.command_id) if command.run else None,
        wait=False,
    )
    claimed = turn is not None and turn.node_id is not None
    if turn is not None and (
        command.strategy == "rollback" or (command.strategy == "interrupt" and claimed)
    ):
        fresh = _first_asked(branch.inbox.values()) or ids.turn_id(branch.id, command.command_id)
        entry = _asking_for(entry, fresh)
        ended = _end_turn(
            branch,
            "cancelled",
            passed=True,
            dropped=_input_and_output(branch, turn) if command.strategy == "rollback" else (),
            then=[*branch.inbox.values(), entry],
        )
        return [*events, _received(entry, command, None), *ended]
    return [*events, *_take_in(branch, entry, command, tip, limits)]


def _take_in(
    branch: Branch,
    entry: Entry,
    command: PostMessage | DeliverMessage,
    tip: str,
    limits: Limits,
) -> list[BranchEvent]:
    """A message becomes a node at once, unless a turn is running or suspended."""
    waiting = len(branch.inbox) + len(branch.unread)
    starts = branch.turn is None and entry.turn_id is not None
    if waiting >= limits.inbox_entries and not starts:
        raise InboxFull(branch.id, limits.inbox_entries)
    if branch.turn is not None and branch.turn.node_id is not None:
        return [_received(entry, command, None)]
    events: list[BranchEvent] = [_received(entry, command, tip)]
    if starts:
        assert entry.turn_id is not None
        events.append(TurnRequested(turn_id=entry.turn_id, root=entry.root, interactive=entry.user))
    return events


def _received(
    entry: Entry, command: PostMessage | DeliverMessage, after: str | None
) -> MessageReceived:
    if isinstance(command, PostMessage):
        return MessageReceived(
            node_id=entry.node_id,
            content=command.content,
            root=entry.root,
            after=after,
            turn_id=entry.turn_id,
        )
    return MessageReceived(
        node_id=entry.node_id,
        content=command.content,
        root=entry.root,
        source="from_branch",
        after=after,
        turn_id=entry.turn_id,
        hops=entry.hops,
        message_id=command.message_id,
        from_node=command.from_node,
        sender=command.sender,
        wait=command.wait,
    )


def _turn_for(branch: Branch, cause: str) -> str:
    """The turn that will read a message that comes now: the first that asks names it (P8)."""
    if branch.turn is not None and branch.turn.node_id is None:
        return branch.turn.id
    return _first_asked(branch.inbox.values()) or ids.turn_id(branch.id, cause)


def _first_asked(entries: Iterable[Entry]) -> str | None:
    return next((entry.turn_id for entry in entries if entry.turn_id is not None), None)


def _asking_for(entry: Entry, turn: str) -> Entry:
    return Entry(
        entry.node_id, entry.root, entry.hops, entry.user, entry.message_id, turn, entry.wait
    )


def _opening(branch: Branch, fork: str) -> BranchOpened:
    ref = ids.of_kind(fork, "node")
    if ref is None or ref.session != ids.session_of(branch.id) or ref.branch == branch.id:
        raise BrokenEdge(f"branch {branch.id} cannot begin after {fork}: no node of its session")
    return BranchOpened(fork=fork)


def _request_turn(command: RequestTurn, branch: Branch) -> list[BranchEvent]:
    if branch.exists:
        raise Invalid(f"branch {branch.id} is open already")
    turn = ids.turn_id(branch.id, command.command_id)
    return [
        _opening(branch, command.fork),
        TurnRequested(turn_id=turn, root=command.root or command.command_id, interactive=True),
    ]


def _send_by_hand(command: SendMessage, branch: Branch, limits: Limits) -> list[BranchEvent]:
    check_open(branch)
    check_send(branch, command.target, 1, limits)
    check_deadline(command.deadline, command.at, limits)
    from_node = command.from_node or branch.tip
    if from_node != branch.fork and not branch.has(from_node):
        raise BrokenEdge(f"{from_node} is not a node of branch {branch.id}")
    return [
        MessageSent(
            message_id=ids.message_id(branch.id, command.command_id),
            target=command.target,
            content=command.content,
            from_node=from_node,
            sender=command.sender,
            root=command.root or command.command_id,
            hops=1,
            deadline=command.deadline,
        )
    ]


def check_deadline(deadline: int | None, at: int, limits: Limits) -> None:
    if deadline is not None and not at < deadline <= at + limits.wait_max_s * 1000:
        raise Invalid(f"a wait takes more than 0 and at most {limits.wait_max_s:.0f} seconds")


def _cancel(command: CancelTurn, branch: Branch) -> list[BranchEvent]:
    status = branch.turn_status(command.turn_id)
    if status is None:
        raise UnknownTurn(command.turn_id)
    if command.turn_id in branch.ended:
        raise TurnAlreadyEnded(command.turn_id, status)
    return _end_turn(branch, "cancelled")


def _archive(command: ArchiveBranch, branch: Branch) -> list[BranchEvent]:
    if not branch.exists:
        raise UnknownBranch(branch.id)
    if branch.merged_into is not None:
        raise BranchMerged(branch.id, into=branch.merged_into)
    if not command.archived:
        return [BranchRestored()]
    refusal = Archived(branch.id)
    events: list[BranchEvent] = [
        MessageRefused(
            node_id=entry.node_id,
            code=refusal.code,
            reason=str(refusal),
            message_id=entry.message_id,
            wait=entry.wait,
        )
        for entry in branch.inbox.values()
    ]
    if branch.turn is not None and branch.turn.node_id is None:
        events += _end_turn(branch, "cancelled", then=[])
    return [*events, BranchArchived()]


def _claim(command: ClaimTurn, branch: Branch) -> list[BranchEvent]:
    turn_id, (n, _) = command.turn_id, command.epoch
    status = branch.turn_status(turn_id)
    turn = branch.turn
    if status is None:
        raise StaleClaim(turn_id, "not requested as far as this log goes", settled=False)
    if turn is None or turn.id != turn_id:
        raise StaleClaim(turn_id, f"has ended: {status}", settled=True)
    if n < turn.n or (n == turn.n and turn.status == "suspended"):
        raise StaleClaim(turn_id, f"is {turn.status} for the {turn.n}. time", settled=True)
    if n > turn.n:
        raise StaleClaim(turn_id, f"was runnable {turn.n} times, not {n}", settled=False)
    if command.epoch <= turn.epoch:
        raise StaleClaim(turn_id, f"is claimed under {turn.epoch}", settled=False)
    if turn.node_id is not None:
        return [
            TurnClaimed(
                turn_id=turn_id,
                epoch=command.epoch,
                worker=command.worker,
                node_id=turn.node_id,
            )
        ]
    return [
        TurnClaimed(
            turn_id=turn_id,
            epoch=command.epoch,
            worker=command.worker,
            node_id=ids.node_id(branch.id, turn_id),
            after=branch.tip,
            pins=command.pins,
            consumed=tuple(
                entry.message_id for entry in branch.unread if entry.message_id is not None
            ),
        )
    ]


def _fenced(branch: Branch, turn_id: str, epoch: Epoch) -> Turn:
    """The running turn, or StaleClaim for any epoch but its newest (P5)."""
    turn = branch.turn
    if turn is None or turn.id != turn_id:
        status = branch.ended.get(turn_id, "unknown")
        raise StaleClaim(turn_id, f"is no longer running: {status}", settled=True)
    if turn.epoch != epoch or turn.status != "running":
        why = f"is {turn.status} under {turn.epoch}, not running under {epoch}"
        raise StaleClaim(turn_id, why, settled=False)
    return turn


def _record_answer(command: RecordAnswer, branch: Branch, limits: Limits) -> list[BranchEvent]:
    turn = _fenced(branch, command.turn_id, command.epoch)
    if turn.calls:
        raise Invalid(f"turn {turn.id} still has calls without a result")
    if len(command.calls) > limits.turn_calls:
        raise BudgetExceeded(
            "tool calls of one model answer", len(command.calls), limits.turn_calls
        )
    step = turn.steps + 1
    answered = ModelAnswered(
        turn_id=turn.id,
        epoch=command.epoch,
        step=step,
        context=command.context,
        text=command.text,
        calls=command.calls,
        usage=command.usage,
        finish=command.finish,
    )
    if not command.calls:
        return [answered, *_end_turn(branch, "completed")]
    if step >= limits.turn_steps:
        error = BudgetExceeded("model calls of this turn", step, limits.turn_steps)
        return [answered, *_end_turn(branch, "error", error=_turn_error(error))]
    return [answered]


def _record_results(command: RecordResults, branch: Branch, limits: Limits) -> list[BranchEvent]:
    turn = _fenced(branch, command.turn_id, command.epoch)
    left = dict.fromkeys(turn.to_run())
    waiting = len(turn.waits)
    events: list[BranchEvent] = []
    for result in command.results:
        if result.node_id not in left:
            continue  # It has its result, or waits: the first one stands.
        del left[result.node_id]
        events.append(
            ToolReturned(
                turn_id=turn.id,
                epoch=command.epoch,
                node_id=result.node_id,
                result=result.result,
                status=result.status,
            )
        )
    for send in command.sends:
        if send.node_id not in left:
            continue
        del left[send.node_id]
        check_send(branch, send.target, turn.hops + 1, limits)
        check_deadline(send.deadline, command.at, limits)
        message = ids.message_id(branch.id, send.node_id)
        events.append(
            MessageSent(
                message_id=message,
                target=send.target,
                content=send.content,
                from_node=send.node_id,
                sender=send.sender,
                root=turn.root,
                hops=turn.hops + 1,
                call=send.node_id,
                deadline=send.deadline,
            )
        )
        if send.deadline is not None:
            waiting += 1
        elif send.result is None:
            raise Invalid(f"the send of call {send.node_id} has neither a deadline nor a result")
        else:
            events.append(
                ToolReturned(
                    turn_id=turn.id,
                    epoch=command.epoch,
                    node_id=send.node_id,
                    result=send.result,
                )
            )
    if command.suspend and waiting and not left:
        events.append(TurnSuspended(turn_id=turn.id, epoch=command.epoch))
    return events


def _deliver(command: DeliverMessage, branch: Branch, limits: Limits) -> list[BranchEvent]:
    if command.message_id in branch.settled:
        return []
    node = ids.node_id(branch.id, command.message_id)
    entry = Entry(
        node_id=node,
        root=command.root,
        hops=command.hops,
        user=False,
        message_id=command.message_id,
        turn_id=_turn_for(branch, command.message_id) if command.wait else None,
        wait=command.wait,
    )
    try:
        check_open(branch)
        return _take_in(branch, entry, command, branch.tip, limits)
    except PlaitError as refusal:
        return [
            MessageRefused(
                node_id=node,
                code=refusal.code,
                reason=str(refusal),
                message_id=command.message_id,
                wait=command.wait,
            )
        ]


def _deliver_note(command: DeliverNote, branch: Branch) -> list[BranchEvent]:
    if command.message_id in branch.notes:
        return []
    busy = branch.turn is not None and branch.turn.node_id is not None
    return [
        MessageReceived(
            node_id=ids.node_id(branch.id, "note", command.message_id),
            content=command.content,
            root=command.root,
            source="note",
            after=None if busy else branch.tip,
            message_id=command.message_id,
        )
    ]


def _end_wait(command: EndWait, branch: Branch) -> list[BranchEvent]:
    wait = branch.waits.get(command.wait_id)
    if wait is None:
        raise Invalid(f"branch {branch.id} has no wait {command.wait_id}")
    answer = command.outcome in ("replied", "failed", "refused")
    if wait.outcome is None:
        ended: list[BranchEvent] = [
            WaitEnded(
                wait_id=command.wait_id,
                outcome=command.outcome,
                call=wait.call,
                content=command.content,
                reply_node=command.reply_node,
                reason=command.reason,
            )
        ]
        turn = branch.turn
        if (
            turn is not None
            and turn.status == "suspended"
            and list(turn.waits) == [command.wait_id]
        ):
            ended.append(TurnResumed(turn_id=turn.id, n=turn.n + 1))
        return ended
    if not answer or wait.late or wait.outcome not in ("expired", "cancelled"):
        return []
    return [
        ReplyLate(
            wait_id=command.wait_id,
            outcome=command.outcome,
            content=command.content,
            reply_node=command.reply_node,
            reason=command.reason,
        )
    ]


def _end_turn(
    branch: Branch,
    status: TurnStatus,
    *,
    error: TurnError | None = None,
    passed: bool = False,
    dropped: tuple[str, ...] = (),
    then: list[Entry] | None = None,
) -> list[BranchEvent]:
    """Ends its waits, settles or passes its debts, places the inbox, requests the next (P7)."""
    turn = branch.turn
    assert turn is not None
    events: list[BranchEvent] = [
        WaitEnded(
            wait_id=wait, outcome="cancelled", call=call, reason=f"turn {turn.id} ended: {status}"
        )
        for wait, call in turn.waits.items()
    ]
    events.append(
        TurnEnded(
            turn_id=turn.id,
            status=status,
            error=error,
            answered=() if passed else tuple(branch.owed),
            passed=passed,
            dropped=dropped,
        )
    )
    entries = [*branch.inbox.values()] if then is None else then
    if not entries:
        return events
    events.append(NodesPlaced(tuple(entry.node_id for entry in entries), after=branch.tip))
    asking = [entry for entry in entries if entry.turn_id is not None]
    if asking:
        assert asking[0].turn_id is not None
        events.append(
            TurnRequested(
                turn_id=asking[0].turn_id,
                root=asking[0].root,
                interactive=any(entry.user for entry in asking),
            )
        )
    return events


def _input_and_output(branch: Branch, turn: Turn) -> tuple[str, ...]:
    """What a rollback drops; messages of other branches stay, for the next turn to read."""
    if turn.node_id is None:
        return tuple(entry.node_id for entry in branch.unread if entry.user)
    return tuple(turn.nodes)


def _turn_error(error: PlaitError) -> TurnError:
    return TurnError(code=error.code, message=str(error))


# -- evolve ----------------------------------------------------------------------------------


def evolve(branch: Branch, recorded: Recorded, limits: Limits) -> None:
    at, sequence = recorded.append.at, recorded.sequence
    for event in recorded.append.events:
        _EVOLVE[type(event)](branch, event, at, sequence)
    remember(branch.commands, recorded, limits)
    branch.version = sequence


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
    turn.steps = event.step
    for call in event.calls:
        turn.calls[call.node_id] = None
        turn.nodes.append(call.node_id)


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
        branch.carried_hops = turn.hops
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
    ToolReturned: _tool_returned,
    TurnSuspended: _turn_suspended,
    TurnResumed: _turn_resumed,
    TurnEnded: _turn_ended,
    MessageSent: _message_sent,
    WaitEnded: _wait_ended,
    ReplyLate: _reply_late,
}
