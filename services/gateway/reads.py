"""The calls that only look: the read models for what is, the log for what a model would see."""

import asyncio
from typing import Annotated, Any

from litestar import get
from litestar.params import PathParameter, QueryParameter
from msgspec import Struct

from plait.events import ids
from plait.events.context import context_digest, render
from plait.events.errors import Code, ReadModelBehind, Unavailable, UnknownNode
from plait.events.store import Position
from plait.projections.queries import (
    BranchView,
    DagView,
    MessageView,
    NodeView,
    SessionView,
    TurnView,
)
from plait.services.gateway.addresses import Addresses
from plait.services.gateway.auth import PUBLIC
from plait.services.gateway.call import Call, bounded
from plait.services.gateway.problems import refusals
from plait.services.gateway.shapes import ADDRESS, Health, SessionList
from plait.services.gateway.waits import turn_end
from plait.services.gateway.writes import SessionId, TurnId, Wait

READY_S = 0.9  # for the log, and for the read models: a balancer's patience is short
LAG = 1_000  # appends that the read models may be behind and still be ready

MinPosition = Annotated[
    str,
    QueryParameter(
        name="min_position",
        description="A command's `position`: the answer covers it. The header `Plait-Position` "
        "does the same.",
    ),
]
_BEHIND = (Code.BAD_POSITION, Code.READ_MODEL_BEHIND)


class BranchList(Struct, frozen=True, kw_only=True):
    items: list[BranchView]
    next_page_token: str | None = None


class Context(Struct, frozen=True, kw_only=True):
    """`messages` is what the next model call at this head would see, in order; `digest` is the one
    that a model's answer records."""

    head_id: str
    digest: str
    messages: list[dict[str, Any]]


@get(
    "/v1/sessions",
    tags=["sessions"],
    summary="List sessions, newest first",
    responses=refusals(*_BEHIND),
)
async def list_sessions(
    request: Call,
    page_size: Annotated[int, QueryParameter(ge=1, le=100, description="At most 100.")] = 50,
    page_token: Annotated[
        str, QueryParameter(description="`next_page_token` of the page before.")
    ] = "",
    min_position: MinPosition = "",
) -> SessionList:
    at_least = await request.at_least(min_position)
    items, token = await request.gateway.queries.sessions(
        request.tenant, page_size, page_token or None, at_least
    )
    return SessionList(items=items, next_page_token=token)


@get(
    "/v1/sessions/{session_id:str}",
    tags=["sessions"],
    summary="A session with HEAD, branches and counts",
    responses=refusals(Code.UNKNOWN_SESSION, *_BEHIND),
)
async def get_session(
    request: Call, session_id: SessionId, min_position: MinPosition = ""
) -> SessionView:
    at_least = await request.at_least(min_position)
    return await request.read(request.gateway.queries.session, session_id, at_least)


@get(
    "/v1/sessions/{session_id:str}/branches",
    tags=["branches"],
    summary="The session's branches: live, merged and archived",
    responses=refusals(Code.UNKNOWN_SESSION, *_BEHIND),
)
async def list_branches(
    request: Call, session_id: SessionId, min_position: MinPosition = ""
) -> BranchList:
    at_least = await request.at_least(min_position)
    items = await request.read(request.gateway.queries.branches, session_id, at_least)
    return BranchList(items=items)


@get(
    "/v1/sessions/{session_id:str}/nodes/{node_id:str}",
    tags=["sessions"],
    summary="One node, whole",
    responses=refusals(Code.UNKNOWN_NODE, *_BEHIND),
)
async def get_node(
    request: Call,
    session_id: SessionId,
    node_id: Annotated[str, PathParameter(description="The node's id.")],
    min_position: MinPosition = "",
) -> NodeView:
    if ids.session_of(node_id) != session_id:
        raise UnknownNode(node_id)
    at_least = await request.at_least(min_position)
    return await request.read(request.gateway.queries.node, node_id, at_least)


@get(
    "/v1/sessions/{session_id:str}/dag",
    tags=["sessions"],
    summary="The session's graph",
    description="`cursor` is the position up to which it was read: follow the events from there.",
    responses=refusals(Code.UNKNOWN_SESSION, *_BEHIND),
)
async def get_dag(request: Call, session_id: SessionId, min_position: MinPosition = "") -> DagView:
    at_least = await request.at_least(min_position)
    return await request.read(request.gateway.queries.dag, session_id, at_least)


@get(
    "/v1/sessions/{session_id:str}/context",
    tags=["sessions"],
    summary="What the next model call would see",
    responses=refusals(
        Code.UNKNOWN_SESSION,
        Code.UNKNOWN_BRANCH,
        Code.UNKNOWN_NODE,
        Code.AMBIGUOUS_BRANCH,
        Code.BRANCH_ARCHIVED,
        Code.BRANCH_MERGED,
        Code.RESERVATION_GONE,
    ),
)
async def get_context(
    request: Call,
    session_id: SessionId,
    head: Annotated[
        str,
        QueryParameter(
            description=f"A node, or for the tip of a branch {ADDRESS}; the tip of HEAD's branch "
            "without."
        ),
    ] = "",
) -> Context:
    gateway, tenant = request.gateway, request.tenant

    async def seen() -> Context:
        node = await Addresses(gateway.handler).head(tenant, session_id, head)
        items = await gateway.transcripts.context(tenant, node)
        texts = await gateway.transcripts.open(items)
        return Context(head_id=node, digest=context_digest(items), messages=render(items, texts))

    return await request.of_log(seen())


@get(
    "/v1/turns/{turn_id:str}",
    tags=["turns"],
    summary="A turn with its steps, waits and usage",
    description="With `wait`, the answer comes when the turn has ended, or when the time is up.",
    responses=refusals(Code.UNKNOWN_TURN, *_BEHIND),
)
async def get_turn(
    request: Call, turn_id: TurnId, wait: Wait = 0.0, min_position: MinPosition = ""
) -> TurnView:
    seconds = bounded(wait, request.gateway)
    at_least = await request.at_least(min_position)
    if seconds and ids.of_kind(turn_id, "turn") is not None:
        ended = await turn_end(request, turn_id, seconds)
        if ended is not None and (at_least is None or ended > at_least):
            at_least = ended
    return await request.read(request.gateway.queries.turn, turn_id, at_least)


@get(
    "/v1/messages/{message_id:str}",
    tags=["messages"],
    summary="A message between branches, with its receipts and its reply",
    responses=refusals(Code.UNKNOWN_MESSAGE, *_BEHIND),
)
async def get_message(
    request: Call,
    message_id: Annotated[str, PathParameter(description="The message's id.")],
    min_position: MinPosition = "",
) -> MessageView:
    at_least = await request.at_least(min_position)
    return await request.read(request.gateway.queries.message, message_id, at_least)


@get(
    "/healthz",
    opt={PUBLIC: True},
    security=[{}],
    tags=["health"],
    summary="The process is alive",
    responses=refusals(public=True),
)
async def healthz() -> Health:
    return Health(status="ok")


@get(
    "/readyz",
    opt={PUBLIC: True},
    security=[{}],
    tags=["health"],
    summary="Log and read models answer, and are not far apart",
    responses=refusals(Code.READ_MODEL_BEHIND, public=True),
)
async def readyz(request: Call) -> Health:
    gateway = request.gateway
    try:
        async with asyncio.timeout(READY_S):
            end = await gateway.store.last_sequence()
    except TimeoutError:
        raise Unavailable("the log does not answer: try again") from None
    enough = Position(gateway.store.generation, max(0, end - LAG))
    try:
        async with asyncio.timeout(READY_S):
            await gateway.queries.sessions(gateway.settings.tenant, 1, None, enough)
    except TimeoutError:
        raise ReadModelBehind(
            f"the read models do not answer, or are more than {LAG} appends behind: try again"
        ) from None
    return Health(status="ok")


ROUTES = (
    list_sessions,
    get_session,
    list_branches,
    get_node,
    get_dag,
    get_context,
    get_turn,
    get_message,
    healthz,
    readyz,
)
