"""The calls that change something."""

from typing import Annotated

import msgspec
from litestar import Response, patch, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import HeaderParameter, JSONBody, PathParameter, QueryParameter

from plait.events.errors import Code
from plait.services.gateway.call import Call, bounded
from plait.services.gateway.idempotency import asked
from plait.services.gateway.problems import BODY_REFUSALS, refusals
from plait.services.gateway.shapes import (
    BranchPatch,
    BranchPatched,
    CheckedOut,
    Checkout,
    MessageDone,
    MessagePosted,
    MessageSent,
    NewMessage,
    NewSend,
    NewSession,
    SessionMade,
    TurnCancelled,
    TurnDone,
    TurnRetried,
)
from plait.services.gateway.waits import answered_message, ended_turn

Key = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        description="1 to 255 printable ASCII characters. The same key and body return the first "
        "answer again for 24 hours; the same key for another call is a 409.",
    ),
]
Wait = Annotated[
    float,
    QueryParameter(
        name="wait",
        ge=0,
        description="Seconds to wait for the end. 0: do not wait; more than the server's longest, "
        "60 by default, is refused.",
    ),
]
SessionId = Annotated[str, PathParameter(description="The session's id.")]
TurnId = Annotated[str, PathParameter(description="The turn's id.")]

_ADDRESSES = (
    Code.UNKNOWN_SESSION,
    Code.UNKNOWN_BRANCH,
    Code.UNKNOWN_NODE,
    Code.AMBIGUOUS_BRANCH,
    Code.BRANCH_ARCHIVED,
    Code.BRANCH_MERGED,
    Code.RESERVATION_GONE,
    Code.CONFLICT,
)


@post(
    "/v1/sessions",
    tags=["sessions"],
    summary="Create a session",
    description="`branch_id` is its first branch, which opens with the first message; `head_id` is "
    "ROOT.",
    responses={
        **refusals(Code.IDEMPOTENCY_MISMATCH, Code.CONFLICT),
        **BODY_REFUSALS,
    },
)
async def create_session(request: Call, data: JSONBody[NewSession], key: Key = None) -> SessionMade:
    call = asked(request.tenant, key, "POST", request.url.path, data)
    return await request.command(
        request.gateway.commands.create_session(request.tenant, data, call)
    )


@post(
    "/v1/sessions/{session_id:str}/messages",
    status_code=202,
    tags=["messages"],
    summary="Post a user's message",
    description="Without an address it goes to HEAD's branch. `after` goes on from a node: on its "
    "branch while it is the tip, else on a new branch that forks there (ROOT before anything was "
    "posted is the session's first branch). `replaces` opens a new branch with a sibling of that "
    "node. None of them moves HEAD. While a turn is under way, the message waits in the branch's "
    "inbox and becomes a node when that ends.",
    responses={
        200: ResponseSpec(
            TurnDone,
            generate_examples=False,
            description="With `wait`: the turn has ended. Its `node_id` is its assistant node.",
        ),
        **refusals(
            *_ADDRESSES,
            Code.IDEMPOTENCY_MISMATCH,
            Code.BRANCH_BUSY,
            Code.INBOX_FULL,
            Code.BROKEN_EDGE,
        ),
        **BODY_REFUSALS,
    },
)
async def post_message(
    request: Call,
    session_id: SessionId,
    data: JSONBody[NewMessage],
    key: Key = None,
    wait: Wait = 0.0,
) -> Response[MessagePosted]:
    seconds = bounded(wait, request.gateway)
    call = asked(request.tenant, key, "POST", request.url.path, data)
    posted = await request.command(
        request.gateway.commands.post(request.tenant, session_id, data, call)
    )
    if seconds and posted.turn_id is not None:
        turn = await ended_turn(request, posted.turn_id, seconds, posted.node_id)
        if turn is not None:
            done = TurnDone(position=posted.position, **msgspec.structs.asdict(turn))
            return Response(done, status_code=200)  # type: ignore[arg-type]
    return Response(posted, status_code=202)


@post(
    "/v1/sessions/{session_id:str}/checkout",
    status_code=200,
    tags=["sessions"],
    summary="Move HEAD to a node",
    description="HEAD is now that node's branch when it is the tip there; else a new branch that "
    "opens with the next message.",
    responses={
        **refusals(
            Code.UNKNOWN_SESSION, Code.UNKNOWN_NODE, Code.IDEMPOTENCY_MISMATCH, Code.CONFLICT
        ),
        **BODY_REFUSALS,
    },
)
async def checkout(
    request: Call, session_id: SessionId, data: JSONBody[Checkout], key: Key = None
) -> CheckedOut:
    call = asked(request.tenant, key, "POST", request.url.path, data)
    return await request.command(
        request.gateway.commands.checkout(request.tenant, session_id, data.node_id, call)
    )


@patch(
    "/v1/sessions/{session_id:str}/branches/{branch:str}",
    tags=["branches"],
    summary="Name, archive or restore a branch",
    description="`branch` is its name or id. Names are unique in a session. An archived branch "
    "takes no messages: what waits in its inbox is refused, and its sender told; a running or "
    "suspended turn finishes.",
    responses={
        **refusals(
            Code.UNKNOWN_SESSION,
            Code.UNKNOWN_BRANCH,
            Code.NAME_TAKEN,
            Code.BRANCH_MERGED,
            Code.RESERVATION_GONE,
            Code.CONFLICT,
        ),
        **BODY_REFUSALS,
    },
)
async def patch_branch(
    request: Call,
    session_id: SessionId,
    branch: Annotated[str, PathParameter(description="The branch's name or id.")],
    data: JSONBody[BranchPatch],
) -> BranchPatched:
    call = asked(request.tenant, None, "PATCH", request.url.path, data)
    commands = request.gateway.commands
    return await request.command(
        commands.patch_branch(request.tenant, session_id, branch, data, call)
    )


@post(
    "/v1/sessions/{session_id:str}/send",
    status_code=202,
    tags=["messages"],
    summary="Send a message from one branch to another",
    description="It becomes a node at the end of the target, carried over in a moment; "
    "`GET /v1/messages/{message_id}` has its receipts. With `wait_reply` the target runs a turn, "
    "and its final text is the reply.",
    responses={
        200: ResponseSpec(
            MessageDone,
            generate_examples=False,
            description="With `wait_reply` and `wait`: the message, whose wait has ended: replied, "
            "expired, cancelled, failed or refused.",
        ),
        **refusals(
            *_ADDRESSES,
            Code.IDEMPOTENCY_MISMATCH,
            Code.SELF_SEND,
            Code.BUDGET_EXCEEDED,
            Code.BROKEN_EDGE,
        ),
        **BODY_REFUSALS,
    },
)
async def send(
    request: Call, session_id: SessionId, data: JSONBody[NewSend], key: Key = None, wait: Wait = 0.0
) -> Response[MessageSent]:
    seconds = bounded(wait, request.gateway)
    call = asked(request.tenant, key, "POST", request.url.path, data)
    sent = await request.command(
        request.gateway.commands.send(request.tenant, session_id, data, call)
    )
    if seconds and data.wait_reply:
        message = await answered_message(request, sent.message_id, seconds)
        if message is not None:
            done = MessageDone(position=sent.position, **msgspec.structs.asdict(message))
            return Response(done, status_code=200)  # type: ignore[arg-type]
    return Response(sent, status_code=202)


@post(
    "/v1/turns/{turn_id:str}/cancel",
    status_code=202,
    tags=["turns"],
    summary="Cancel a turn",
    description="It ends at once, whatever it waits for; what it did so far stays in the graph.",
    responses={
        **refusals(Code.UNKNOWN_TURN, Code.TURN_ENDED, Code.IDEMPOTENCY_MISMATCH, Code.CONFLICT),
        415: BODY_REFUSALS[415],
    },
)
async def cancel_turn(request: Call, turn_id: TurnId, key: Key = None) -> TurnCancelled:
    await request.no_fields()
    call = asked(request.tenant, key, "POST", request.url.path, None)
    return await request.command(request.gateway.commands.cancel(request.tenant, turn_id, call))


@post(
    "/v1/turns/{turn_id:str}/retry",
    status_code=202,
    tags=["turns"],
    summary="Run a turn's input once more",
    description="A new turn on a new branch that forks where the ended turn's answer began; HEAD "
    "stays where it is.",
    responses={
        **refusals(Code.UNKNOWN_TURN, Code.TURN_ACTIVE, Code.IDEMPOTENCY_MISMATCH, Code.CONFLICT),
        415: BODY_REFUSALS[415],
    },
)
async def retry_turn(request: Call, turn_id: TurnId, key: Key = None) -> TurnRetried:
    await request.no_fields()
    call = asked(request.tenant, key, "POST", request.url.path, None)
    return await request.command(request.gateway.commands.retry(request.tenant, turn_id, call))


ROUTES = (
    create_session,
    post_message,
    checkout,
    patch_branch,
    send,
    cancel_turn,
    retry_turn,
)
