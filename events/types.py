"""What happened: past-tense events, one tagged union, MessagePack maps in the log.

An `Append` is one message in the log: 1..n events of one branch, or of the session itself.
Published events never change: a new shape gets a new class with the tag `<Name>.<version>`, the
old class moves to `UPCASTERS` in `codec.py`, and `tests/histories/` keeps a log that holds it.

Events hold no stream sequences (P22); a node's `seq` is the position at which it was placed.
Times are milliseconds since the epoch, for people and for deadlines; order is the log's alone.
"""

from typing import Literal

from msgspec import Struct

Epoch = tuple[int, int]  # (n, delivery): how often runnable, which delivery of its work item

Source = Literal["user", "from_branch", "note"]
TurnStatus = Literal["completed", "error", "cancelled"]
Outcome = Literal["replied", "expired", "cancelled", "failed", "refused"]


class Content(Struct, frozen=True, omit_defaults=True):
    """Text that a person or a model wrote: sealed, so that structure stays readable without it.

    `data` holds the sealed MessagePack list of parts, or is None when the object store holds it
    under `blob`. `size` counts the UTF-8 bytes of all text parts. `digest` is keyed (HMAC) with
    the session's key `key`, so that an erased text cannot be guessed from it.
    """

    size: int
    digest: str
    key: str
    data: bytes | None = None
    cipher: str = "none"
    blob: str | None = None


class Usage(Struct, frozen=True, omit_defaults=True):
    """Tokens of one model call, as the provider counted them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class ToolCall(Struct, frozen=True, omit_defaults=True):
    """One call that a model asked for. `node_id` is its node; `args` is sealed JSON text."""

    node_id: str
    name: str
    args: Content


class Pins(Struct, frozen=True, omit_defaults=True):
    """What a turn keeps from its first claim to its end, whoever runs it (P10)."""

    model: str
    system_prompt: str | None = None  # the digest of the session's prompt
    tools: tuple[str, ...] = ()  # names, in the order in which the model sees them
    tools_digest: str | None = None  # of the schemas and descriptions


class TurnError(Struct, frozen=True):
    """Why a turn failed: a stable code, and a text without secrets."""

    code: str
    message: str


class Event(Struct, frozen=True, omit_defaults=True, tag=True, tag_field="t"):
    """The root of all events."""


# -- the session's own subject ---------------------------------------------------------------


class SessionCreated(Event, frozen=True):
    """A session and its ROOT. HEAD reserves `branch_id`, which opens with its first message."""

    branch_id: str
    title: Content | None = None
    system_prompt: Content | None = None
    model: str | None = None
    attended: bool = True


class HeadMoved(Event, frozen=True):
    """HEAD names `branch_id`. With `fork`, the branch is reserved only: it opens at that node
    with its first message, if HEAD still names it then (P2)."""

    branch_id: str
    fork: str | None = None


class BranchNamed(Event, frozen=True):
    """The branch carries this name from here on; None takes its name away."""

    branch_id: str
    name: str | None = None


# -- a branch: opening and closing -----------------------------------------------------------


class BranchOpened(Event, frozen=True):
    """The first event of a branch. `fork` is the predecessor of its first node."""

    fork: str


class BranchArchived(Event, frozen=True):
    """Closed for new messages; what its inbox held is refused in the same append (P18)."""


class BranchRestored(Event, frozen=True):
    """Open again after an archiving."""


# -- a branch: its inbox ---------------------------------------------------------------------


class MessageReceived(Event, frozen=True):
    """A message for this branch. With `after` it became a node at once, following that node;
    without, it waits in the inbox until `NodesPlaced` names it.

    `run` asks for a turn, which is then `turn_id`. A message of another branch carries
    `message_id`, `from_node` (the calling node) and `sender` (its branch's name then), and
    `wait` when the sender waits for a reply. `root` and `hops` tell the chain of cause and
    effect: the command that began it, and how many messages long it is.
    """

    node_id: str
    content: Content
    root: str
    source: Source = "user"
    after: str | None = None
    turn_id: str | None = None
    hops: int = 0
    message_id: str | None = None
    from_node: str | None = None
    sender: str | None = None
    wait: bool = False


class MessageRefused(Event, frozen=True):
    """The branch does not take, or no longer keeps, this message. `code` is stable."""

    node_id: str
    code: str
    reason: str
    message_id: str | None = None
    wait: bool = False


class NodesPlaced(Event, frozen=True):
    """Inbox entries became nodes, each following the one before it, the first `after`."""

    node_ids: tuple[str, ...]
    after: str


# -- a branch: turns -------------------------------------------------------------------------


class TurnRequested(Event, frozen=True):
    """A turn may run from here on (n = 1). `interactive`: a user asked, not another branch."""

    turn_id: str
    root: str
    interactive: bool = False


class TurnClaimed(Event, frozen=True):
    """A worker runs the turn under this epoch; every older epoch is fenced off from here on.

    The first claim places the turn's assistant node `node_id` (running) `after` the tip, pins
    what the turn runs with, and names the messages of other branches that it reads (`consumed`).
    A later claim repeats `node_id` and nothing else.
    """

    turn_id: str
    epoch: Epoch
    worker: str
    node_id: str
    after: str | None = None
    pins: Pins | None = None
    consumed: tuple[str, ...] = ()


class ModelAnswered(Event, frozen=True):
    """One model call of the turn, whole. Its calls become running tool nodes, in order, whose
    caller is the turn's assistant node. Without calls, the turn ends in the same append."""

    turn_id: str
    epoch: Epoch
    step: int
    context: str  # digest of the exact context that the model saw
    text: Content | None = None
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    finish: str = "stop"


class ModelFailed(Event, frozen=True):
    """A model call of the turn that gave no answer: the `nth` of the turn that did not, at `step`.

    With `wait_id` the turn is suspended in the same append, and asks again when that wait ends at
    `deadline`: it waits for nothing but time, and holds nothing. Without, the turn ends in the
    same append.
    """

    turn_id: str
    epoch: Epoch
    step: int
    nth: int
    context: str  # digest of the exact context that was sent
    error: TurnError
    wait_id: str | None = None
    deadline: int | None = None


class ToolReturned(Event, frozen=True):
    """The one result of a call. A refused or failed call is a result too (status error)."""

    turn_id: str
    epoch: Epoch
    node_id: str
    result: Content
    status: Literal["completed", "error"] = "completed"


class TurnSuspended(Event, frozen=True):
    """The turn waits and holds nothing; its work item is acked. Which waits are open follows
    from the events before."""

    turn_id: str
    epoch: Epoch


class TurnResumed(Event, frozen=True):
    """Its last open wait has ended: the turn is runnable for the n-th time."""

    turn_id: str
    n: int


class TurnEnded(Event, frozen=True):
    """The turn's end. Its assistant node and its running tool nodes take this status.

    `answered` names the waiting messages whose reply is this end: the final text, or the error.
    With `passed` the next turn owes them instead (interrupt, rollback). `dropped` names nodes
    that stay in the log and leave the context of whatever follows them (rollback).
    """

    turn_id: str
    status: TurnStatus
    error: TurnError | None = None
    answered: tuple[str, ...] = ()
    passed: bool = False
    dropped: tuple[str, ...] = ()


# -- a branch: messages that it sends, and what it waits for ---------------------------------


class MessageSent(Event, frozen=True):
    """This branch sends `content` to `target`, in the order of its log (P13); `replies` carries
    it over. `from_node` is the calling node, or the tip when a user sends by hand; `call` is the
    suspended tool call that a wait would resolve. `deadline` (ms) makes it a wait.
    """

    message_id: str
    target: str
    content: Content
    from_node: str
    sender: str
    root: str
    hops: int
    call: str | None = None
    deadline: int | None = None


class WaitEnded(Event, frozen=True):
    """The one end of a wait. Where a call waited, this is the call's result: the reply's
    `content`, or `reason`. `reply_node` is the node that answered. The pause after a failed model
    call ends as expired."""

    wait_id: str
    outcome: Outcome
    call: str | None = None
    content: Content | None = None
    reply_node: str | None = None
    reason: str | None = None


class ReplyLate(Event, frozen=True):
    """An answer to a message whose wait had ended before: kept, linked, and in no context."""

    wait_id: str
    outcome: Outcome
    content: Content | None = None
    reply_node: str | None = None
    reason: str | None = None


SessionEvent = SessionCreated | HeadMoved | BranchNamed
BranchEvent = (
    BranchOpened
    | BranchArchived
    | BranchRestored
    | MessageReceived
    | MessageRefused
    | NodesPlaced
    | TurnRequested
    | TurnClaimed
    | ModelAnswered
    | ModelFailed
    | ToolReturned
    | TurnSuspended
    | TurnResumed
    | TurnEnded
    | MessageSent
    | WaitEnded
    | ReplyLate
)
AnyEvent = SessionEvent | BranchEvent


class Append(Struct, frozen=True, omit_defaults=True):
    """One message in the log. `command_id` tells a retry after a lost answer from a lost race;
    `root` is the command that began the chain of cause and effect; `cause` the turn, message or
    wait that this append carries on, if any; `at` is the writer's clock in ms.
    """

    command_id: str
    at: int
    events: tuple[AnyEvent, ...]
    root: str = ""
    cause: str = ""
    v: int = 1
