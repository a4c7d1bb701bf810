"""What is asked of one session or one branch: imperative messages with all that they need.

Clocks, ids and chance come in with the command: `command_id` names it for ever (a retry has the
same one), `at` is the asker's clock in ms. Content is sealed before (see `content.py`).
"""

from typing import Literal

from msgspec import Struct

from plait.events.types import Content, Epoch, Outcome, Pins, ToolCall, TurnError, Usage

MultitaskStrategy = Literal["enqueue", "reject", "interrupt", "rollback"]


class Command(Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    command_id: str
    at: int
    cause: str = ""
    root: str = ""  # the command that began the chain; empty: this one does


# -- a session -------------------------------------------------------------------------------


class SessionCommand(Command, frozen=True, kw_only=True):
    session_id: str


class CreateSession(SessionCommand, frozen=True, kw_only=True):
    title: Content | None = None
    system_prompt: Content | None = None
    model: str | None = None
    attended: bool = True


class MoveHead(SessionCommand, frozen=True, kw_only=True):
    """`fork` None: to an open branch. Else to a reservation at that node."""

    branch_id: str
    fork: str | None = None


class NameBranch(SessionCommand, frozen=True, kw_only=True):
    branch_id: str
    name: str | None


# -- a branch: what users ask ----------------------------------------------------------------


class BranchCommand(Command, frozen=True, kw_only=True):
    branch_id: str


class PostMessage(BranchCommand, frozen=True, kw_only=True):
    """A user's message. `fork` opens the branch there if it is not open yet. `expected_tip`
    refuses the post (`NotATip`) when the branch has moved on."""

    content: Content
    run: bool = True
    strategy: MultitaskStrategy = "enqueue"
    fork: str | None = None
    expected_tip: str | None = None


class RequestTurn(BranchCommand, frozen=True, kw_only=True):
    """Opens the branch at `fork` with a turn and no message: a retry of what followed there."""

    fork: str


class SendMessage(BranchCommand, frozen=True, kw_only=True):
    """A send by hand. `deadline` (ms): the sender wants the reply until then."""

    target: str
    content: Content
    sender: str
    deadline: int | None = None
    from_node: str | None = None  # None: the tip


class CancelTurn(BranchCommand, frozen=True, kw_only=True):
    turn_id: str


class ArchiveBranch(BranchCommand, frozen=True, kw_only=True):
    archived: bool


# -- a branch: what turns does ---------------------------------------------------------------


class ClaimTurn(BranchCommand, frozen=True, kw_only=True):
    turn_id: str
    epoch: Epoch
    worker: str
    pins: Pins  # used by the first claim only


class RecordAnswer(BranchCommand, frozen=True, kw_only=True):
    """One whole answer of the model; the turn ends with it when it has no calls."""

    turn_id: str
    epoch: Epoch
    context: str
    text: Content | None
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    finish: str = "stop"


class RecordFailure(BranchCommand, frozen=True, kw_only=True):
    """The model gave no answer. With `retry` the turn may ask it again, in `after_s` if the
    provider said when; else, and after too many in a row, the turn ends with `error`."""

    turn_id: str
    epoch: Epoch
    context: str
    error: TurnError
    retry: bool = False
    after_s: float | None = None


class ToolResult(Struct, frozen=True):
    node_id: str
    result: Content
    status: Literal["completed", "error"] = "completed"


class ToolSend(Struct, frozen=True):
    """A `send_to_branch` call, resolved. Without `deadline` the call's result is `result`."""

    node_id: str
    target: str
    content: Content
    sender: str
    result: Content | None = None
    deadline: int | None = None


class RecordResults(BranchCommand, frozen=True, kw_only=True):
    """What calls of the last answer gave. A call that has a result already is left as it is.
    With `suspend` the turn suspends in the same append if waits are open and no call is left."""

    turn_id: str
    epoch: Epoch
    results: tuple[ToolResult, ...] = ()
    sends: tuple[ToolSend, ...] = ()
    suspend: bool = True


class FailTurn(BranchCommand, frozen=True, kw_only=True):
    turn_id: str
    epoch: Epoch
    error: TurnError


# -- a branch: what replies carries over -----------------------------------------------------


class DeliverMessage(BranchCommand, frozen=True, kw_only=True):
    """A message of another branch. Ends in one event here: received, or refused."""

    message_id: str
    content: Content
    from_node: str
    sender: str
    hops: int
    wait: bool


class DeliverNote(BranchCommand, frozen=True, kw_only=True):
    """Plait's own note to the sender that its message was refused (P17): starts no turn."""

    message_id: str
    content: Content


class EndWait(BranchCommand, frozen=True, kw_only=True):
    """The end of a wait; after its end, an answer is kept as late and everything else is void."""

    wait_id: str
    outcome: Outcome
    content: Content | None = None
    reply_node: str | None = None
    reason: str | None = None


AnySessionCommand = CreateSession | MoveHead | NameBranch
AnyBranchCommand = (
    PostMessage
    | RequestTurn
    | SendMessage
    | CancelTurn
    | ArchiveBranch
    | ClaimTurn
    | RecordAnswer
    | RecordFailure
    | RecordResults
    | FailTurn
    | DeliverMessage
    | DeliverNote
    | EndWait
)
AnyCommand = AnySessionCommand | AnyBranchCommand
