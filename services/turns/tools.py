"""What a model can call: the branch tools, and Python callables of the process.

`send_to_branch` acts by what is recorded with its call, so it never acts twice. The two that read
ask the read models, and their answers are recorded like any result. Any other tool may run again
after a crash, and is given the id of its call's node as idempotency key.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct
from redis.exceptions import RedisError

from plait.events import addressing, ids
from plait.events.branch import check_send
from plait.events.commands import ToolSend
from plait.events.content import Contents
from plait.events.errors import Invalid, Retryable, UnknownTurn
from plait.events.handler import Handler
from plait.events.store import Position
from plait.projections.queries import Queries
from plait.services.turns.models import ToolSpec

LISTED = 100  # branches in one answer, the latest
READ_MESSAGES = 20  # of a branch, unless the model asks for another number
READ_MESSAGES_MAX = 100
READ_CHARS = 24_000  # of one transcript
MESSAGE_CHARS = 6_000  # of one message in it


class Tool(NamedTuple):
    """A callable of this process: `call(arguments, idempotency_key)` gives the result's text.
    What it raises becomes an error result that the model sees."""

    name: str
    description: str
    schema: dict[str, Any]
    call: Callable[[dict[str, Any], str], Awaitable[str]]


class Caller(NamedTuple):
    """Where a call comes from. `node_id` is the call's own node."""

    tenant: str
    branch_id: str
    turn_id: str
    node_id: str


class SendToBranch(Struct, frozen=True, forbid_unknown_fields=True):
    target_branch: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="The branch to send to: its name, or the id of it or of one of its nodes; "
            "a branch of another session as `<session>:<name>`.",
        ),
    ]
    message: Annotated[
        str, Meta(min_length=1, description="What the other branch reads, as a message of yours.")
    ]
    wait_reply: Annotated[
        bool,
        Meta(
            description="True: the other branch answers now, and its answer is this call's result. "
            "False: the message is delivered, and read at the other branch's next turn."
        ),
    ] = False
    timeout_s: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="How many seconds to wait for the reply at most. Only with wait_reply.",
            ),
        ]
        | None
    ) = None


class ListBranches(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ReadBranch(Struct, frozen=True, forbid_unknown_fields=True):
    target_branch: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="The branch to read: its name, or the id of it or of one of its nodes; "
            "a branch of another session as `<session>:<name>`.",
        ),
    ]
    messages: Annotated[
        int,
        Meta(ge=1, le=READ_MESSAGES_MAX, description="How many messages, counted from the end."),
    ] = READ_MESSAGES


def _schema(arguments: type[Struct]) -> dict[str, Any]:
    """The schema in one piece: not every provider follows references."""
    (schema,), components = msgspec.json.schema_components([arguments])
    name = schema["$ref"].rpartition("/")[2]
    whole: dict[str, Any] = components[name]
    del whole["title"]
    return whole


SEND_TO_BRANCH = ToolSpec(
    name="send_to_branch",
    description="Sends a message to another branch of the conversation, which another model works "
    "on. Use wait_reply to ask it something and go on with its answer.",
    schema=_schema(SendToBranch),
)
LIST_BRANCHES = ToolSpec(
    name="list_branches",
    description="Lists the branches of this conversation, the latest last: name, id, head, status, "
    "whether a model is working there, and how many messages it has.",
    schema=_schema(ListBranches),
)
READ_BRANCH = ToolSpec(
    name="read_branch",
    description="Reads the last messages of another branch, without sending it anything.",
    schema=_schema(ReadBranch),
)


def specs(tools: Sequence[Tool], *, reading: bool) -> tuple[ToolSpec, ...]:
    """All that a model is told of, the branch tools first. Raises Invalid when names collide."""
    branch_tools = (SEND_TO_BRANCH, LIST_BRANCHES, READ_BRANCH) if reading else (SEND_TO_BRANCH,)
    told = (*branch_tools, *(ToolSpec(t.name, t.description, t.schema) for t in tools))
    names = [spec.name for spec in told]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise Invalid(f"two tools have the name {', '.join(sorted(twice))}: rename one")
    return told


def specs_digest(told: Sequence[ToolSpec]) -> str:
    listed = [msgspec.to_builtins(spec) for spec in told]
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


async def send_to_branch(
    args: str, caller: Caller, *, handler: Handler, contents: Contents, now: int
) -> ToolSend:
    """The send that the call asks for, resolved and checked; recording it is what sends.

    Raises a PlaitError that tells the model what to do instead.
    """
    try:
        asked = msgspec.json.decode(args, type=SendToBranch)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Invalid(
            f"send_to_branch: {error}. Its arguments are target_branch and message, and if wanted "
            "wait_reply (true or false) and timeout_s (a number)"
        ) from None
    tenant, branch_id, turn_id, node_id = caller
    limits, session = handler.limits, ids.session_of(branch_id)
    deadline: int | None = None
    if asked.wait_reply:
        wait_s = limits.wait_default_s if asked.timeout_s is None else asked.timeout_s
        if wait_s > limits.wait_max_s:
            raise Invalid(f"timeout_s is at most {limits.wait_max_s:.0f} seconds")
        deadline = now + max(1, int(wait_s * 1000))
    target = await addressing.resolve(handler, tenant, session, asked.target_branch)
    sender = await addressing.label(handler, tenant, branch_id, seen_from=ids.session_of(target))
    content = await contents.write(asked.message, tenant, session)
    result = None
    if deadline is None:
        accepted = {
            "status": "accepted",
            "message_id": ids.message_id(branch_id, node_id),
            "branch_id": target,
        }
        result = await contents.write(json.dumps(accepted), tenant, session)
    branch = await handler.branch(tenant, branch_id)
    if branch.turn is None or branch.turn.id != turn_id:
        raise UnknownTurn(turn_id)
    check_send(branch, target, branch.turn.hops + 1, limits)
    return ToolSend(node_id, target, content, sender, result, deadline)


class Reading:
    """`list_branches` and `read_branch`: what their answers hold is bounded, and says what it
    leaves out."""

    def __init__(self, queries: Queries, handler: Handler) -> None:
        self._queries, self._handler = queries, handler
        self._tools = {LIST_BRANCHES.name: self._list, READ_BRANCH.name: self._read}

    def has(self, name: str) -> bool:
        return name in self._tools

    async def run(self, name: str, args: str, caller: Caller, known: int) -> str:
        """The answer, as JSON text, which covers the caller's branch up to sequence `known`.

        Raises a PlaitError that tells the model what to do instead.
        """
        try:
            return await self._tools[name](args, caller, known)
        except (Retryable, RedisError, OSError) as error:
            # The turn need not wait for a view: the model can do without, or call again.
            raise Invalid(
                f"{name}: the view of the branches is not available ({type(error).__name__}): "
                "go on without it, or try again later"
            ) from None

    async def _list(self, args: str, caller: Caller, known: int) -> str:
        _decoded(args, ListBranches, "list_branches takes no arguments")
        session = ids.session_of(caller.branch_id)
        all_views = await self._queries.branches(caller.tenant, session, self._position(known))
        views = [view for view in all_views if view.nodes or view.busy]  # One may be reserved only.
        told = [
            {
                "name": view.name,
                "branch_id": view.branch_id,
                "head_id": view.head_id,
                "status": view.status,
                "busy": view.busy,
                "messages": view.nodes,
                **({"is": "this branch"} if view.branch_id == caller.branch_id else {}),
            }
            for view in views[-LISTED:]
        ]
        left_out = len(views) - len(told)
        return json.dumps({"branches": told, "left_out": left_out}, ensure_ascii=False)

    async def _read(self, args: str, caller: Caller, known: int) -> str:
        asked = _decoded(args, ReadBranch, "its arguments are target_branch and messages")
        tenant = caller.tenant
        branch = await addressing.resolve(
            self._handler, tenant, ids.session_of(caller.branch_id), asked.target_branch
        )
        state = await self._handler.branch(tenant, branch)
        tip, at_least = state.tip, self._position(max(known, state.version))
        messages: list[dict[str, Any]] = []
        node_id: str | None = tip
        left = READ_CHARS
        root = ids.root_id(ids.session_of(branch))
        while node_id is not None and node_id != root and len(messages) < asked.messages and left:
            node = await self._queries.node(tenant, node_id, at_least)
            text = shortened(node.text or "", min(MESSAGE_CHARS, left))
            left -= len(text)
            sender = node.metadata.get("sender")
            messages.append(
                {
                    "node_id": node.id,
                    "role": node.role,
                    **({"from": sender} if sender else {}),
                    **({"status": node.status} if node.status != "completed" else {}),
                    "text": text,
                }
            )
            node_id = node.predecessor or node.caller  # A fork may begin at a tool call.
        earlier = node_id is not None and node_id != root
        told = {
            "branch": await addressing.label(self._handler, tenant, branch),
            "branch_id": branch,
            "head_id": tip,
            "messages": messages[::-1],
            "earlier_messages_left_out": earlier,
        }
        return json.dumps(told, ensure_ascii=False)

    def _position(self, known: int) -> Position:
        return Position(self._handler.store.generation, known)


def shortened(text: str, chars: int) -> str:
    """The text's two ends, with a marker that says how much is left out between them."""
    if len(text) <= chars:
        return text
    marker = f"\n[… {len(text) - chars} characters left out …]\n"
    head = chars // 2
    return text[:head] + marker + text[len(text) - (chars - head) :]


A = TypeVar("A", bound=Struct)


def _decoded(args: str, shape: type[A], hint: str) -> A:
    try:
        return msgspec.json.decode(args or "{}", type=shape)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise Invalid(f"{error}: {hint}") from None
