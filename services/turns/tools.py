"""What a model can call: the branch tools, and Python callables of the process.

A branch tool acts by what is recorded with its call, so it never acts twice; any other may run
again after a crash, and is given the id of its call's node as idempotency key.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from plait.events import addressing, ids
from plait.events.branch import check_send
from plait.events.commands import ToolSend
from plait.events.content import Contents
from plait.events.errors import Invalid, UnknownTurn
from plait.events.handler import Handler
from plait.services.turns.models import ToolSpec


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
BRANCH_TOOLS = (SEND_TO_BRANCH,)


def specs(tools: Sequence[Tool]) -> tuple[ToolSpec, ...]:
    """All that a model is told of, the branch tools first. Raises Invalid when names collide."""
    told = (*BRANCH_TOOLS, *(ToolSpec(t.name, t.description, t.schema) for t in tools))
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
