"""The shapes of the answers to queries, as they go out over HTTP."""

from typing import Literal

from msgspec import Struct

from plait.projections.schema import Role


class NodeView(Struct, frozen=True, kw_only=True):
    """One node. `seq` orders nodes; `status` is running, completed, error, cancelled, or pending
    for a message that still waits in an inbox, or refused for one that was turned away there.
    `metadata` holds `from_branch` (the calling node) and `sender` for messages of branches.
    `text` is None in lists (`dag`) and the whole text in `node`; a tool node has its arguments
    (JSON text) in `args` and its result in `text`."""

    id: str
    session_id: str
    branch_id: str
    seq: int | None
    role: Role
    status: str
    name: str | None = None
    caller: str | None = None
    predecessor: str | None = None
    source: str | None = None
    turn_id: str | None = None
    metadata: dict[str, str] = {}
    created_at: int = 0
    text: str | None = None
    args: str | None = None


class BranchView(Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    """`nodes` counts the branch's own nodes; `from_` is the node at which it forked."""

    branch_id: str
    name: str | None
    head_id: str
    status: Literal["live", "merged", "archived"]
    busy: bool
    nodes: int
    turn_id: str | None = None  # the turn that makes it busy
    from_: str | None = None


class SessionView(Struct, frozen=True, kw_only=True):
    session_id: str
    title: str | None
    model: str | None
    attended: bool
    created_at: int
    head_branch_id: str
    head_id: str
    nodes: int
    branches: list[BranchView]
    position: str  # up to which this answer has read


class SessionItem(Struct, frozen=True, kw_only=True):
    """A line of the list of sessions, newest first."""

    session_id: str
    title: str | None
    created_at: int


class Receipt(Struct, frozen=True, kw_only=True):
    """`kind`: accepted, delivered, consumed, then replied, expired, cancelled, failed or refused;
    late for an answer after its wait had ended."""

    kind: str
    at: int
    position: str


class ReplyView(Struct, frozen=True, kw_only=True):
    node_id: str | None
    text: str
    status: str  # the wait's outcome; late replies say late


class MessageView(Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    message_id: str
    from_: str  # the calling node
    target: str  # the target's branch id
    node_id: str  # the node on the target's branch
    text: str
    wait_reply: bool
    deadline: int | None
    receipts: list[Receipt]
    reply: ReplyView | None = None


class StepView(Struct, frozen=True, kw_only=True):
    """One model call of a turn, with the calls that it asked for. One that gave no answer has
    `finish` "error" and its `error`, and stands before the one that did at this step; `retry_at`
    (ms) is until when the turn paused then, if it went on."""

    step: int
    text: str | None
    context: str
    finish: str
    calls: list[str]  # node ids
    error: dict[str, str] | None = None  # code, message
    retry_at: int | None = None


class WaitView(Struct, frozen=True, kw_only=True):
    wait_id: str
    call: str | None
    target: str
    deadline: int
    outcome: str | None  # None: open


class TurnView(Struct, frozen=True, kw_only=True):
    """`status`: requested, running, suspended, completed, error or cancelled."""

    turn_id: str
    session_id: str
    branch_id: str
    node_id: str | None
    status: str
    text: str | None
    steps: list[StepView]
    waits: list[WaitView]
    usage: dict[str, int]  # input_tokens, output_tokens, cached_tokens, summed
    error: dict[str, str] | None = None  # code, message


class LineView(Struct, frozen=True, kw_only=True):
    """`chain`: predecessor to node in a branch; `fork`: predecessor to a branch's first node
    where the predecessor is on another branch (or has an earlier child); `call`: caller to tool
    node; `communication`: calling node to the from_branch node."""

    kind: Literal["chain", "fork", "spawn", "merge", "attach", "communication", "call"]
    node_ids: tuple[str, str]


class DagView(Struct, frozen=True, kw_only=True):
    nodes: list[NodeView]
    lines: list[LineView]
    cursor: str  # the position that the answer has read
