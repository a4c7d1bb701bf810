"""What is decided for messages that come in, from users and branches, and when one closes."""

from collections.abc import Iterable

import msgspec

from plait.events import ids
from plait.events.branch.state import Branch, Entry, Turn, check_open
from plait.events.branch.turns import end_turn
from plait.events.commands import (
    ArchiveBranch,
    DeliverMessage,
    DeliverNote,
    PostMessage,
    RequestTurn,
)
from plait.events.errors import (
    BranchArchived as Archived,
)
from plait.events.errors import (
    BranchBusy,
    BranchMerged,
    BrokenEdge,
    InboxFull,
    Invalid,
    NotATip,
    PlaitError,
    UnknownBranch,
)
from plait.events.limits import Limits
from plait.events.types import (
    BranchArchived,
    BranchEvent,
    BranchOpened,
    BranchRestored,
    MessageReceived,
    MessageRefused,
    TurnRequested,
)


def post(command: PostMessage, branch: Branch, limits: Limits) -> list[BranchEvent]:
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
        entry = msgspec.structs.replace(entry, turn_id=fresh)
        ended = end_turn(
            branch,
            "cancelled",
            passed=True,
            dropped=_input_and_output(branch, turn) if command.strategy == "rollback" else (),
            then=[*branch.inbox.values(), entry],
        )
        return [*events, _received(entry, command, None), *ended]
    return [*events, *_take_in(branch, entry, command, tip, limits)]


def request_turn(command: RequestTurn, branch: Branch) -> list[BranchEvent]:
    turn = ids.turn_id(branch.id, command.command_id)
    if turn in branch.sequences:
        return []
    if branch.exists:
        raise Invalid(f"branch {branch.id} is open already")
    return [
        _opening(branch, command.fork),
        TurnRequested(turn_id=turn, root=command.root or command.command_id, interactive=True),
    ]


def archive(command: ArchiveBranch, branch: Branch) -> list[BranchEvent]:
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
        events += end_turn(branch, "cancelled", then=[])
    return [*events, BranchArchived()]


def deliver(command: DeliverMessage, branch: Branch, limits: Limits) -> list[BranchEvent]:
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


def deliver_note(command: DeliverNote, branch: Branch) -> list[BranchEvent]:
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


def _opening(branch: Branch, fork: str) -> BranchOpened:
    ref = ids.of_kind(fork, "node")
    if ref is None or ref.session != ids.session_of(branch.id) or ref.branch == branch.id:
        raise BrokenEdge(f"branch {branch.id} cannot begin after {fork}: no node of its session")
    return BranchOpened(fork=fork)


def _input_and_output(branch: Branch, turn: Turn) -> tuple[str, ...]:
    """What a rollback drops; messages of other branches stay, for the next turn to read."""
    if turn.node_id is None:
        return tuple(entry.node_id for entry in branch.unread if entry.user)
    return tuple(turn.nodes)
