"""A branch: its inbox, its turns, what it sends and waits for. Pure: decide and evolve.

    requested → running ⇄ suspended → completed | error | cancelled

`decide` looks only at structure, never at texts. `evolve` folds in place: a state has one owner.
"""

from collections.abc import Sequence
from typing import assert_never

from plait.events.branch import inbox, sends, turns
from plait.events.branch.sends import check_send
from plait.events.branch.state import Branch, Entry, Turn, Wait, check_open, evolve
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
    RecordFailure,
    RecordResults,
    RequestTurn,
    SendMessage,
)
from plait.events.limits import Limits
from plait.events.types import BranchEvent

__all__ = ["Branch", "Entry", "Turn", "Wait", "check_open", "check_send", "decide", "evolve"]


def decide(command: AnyBranchCommand, branch: Branch, limits: Limits) -> Sequence[BranchEvent]:
    """Raises a PlaitError that says what to do; an empty answer: it was done before."""
    if branch.done_at(command.command_id) is not None:
        return []
    match command:
        case PostMessage():
            return inbox.post(command, branch, limits)
        case RequestTurn():
            return inbox.request_turn(command, branch)
        case SendMessage():
            return sends.send_by_hand(command, branch, limits)
        case CancelTurn():
            return turns.cancel(command, branch)
        case ArchiveBranch():
            return inbox.archive(command, branch)
        case ClaimTurn():
            return turns.claim(command, branch)
        case RecordAnswer():
            return turns.record_answer(command, branch, limits)
        case RecordFailure():
            return turns.record_failure(command, branch, limits)
        case RecordResults():
            return turns.record_results(command, branch, limits)
        case FailTurn():
            turns.fenced(branch, command.turn_id, command.epoch)
            return turns.end_turn(branch, "error", error=command.error)
        case DeliverMessage():
            return inbox.deliver(command, branch, limits)
        case DeliverNote():
            return inbox.deliver_note(command, branch)
        case EndWait():
            return sends.end_wait(command, branch)
        case _:
            assert_never(command)
