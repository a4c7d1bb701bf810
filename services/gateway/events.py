"""A session's events as they come, over server-sent events: `id:` is the log position.

What is past is read from the log up to where the process's tail stood when the client joined it;
from there on the tail's own order goes on. So nothing is missed and nothing comes twice.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from litestar import get
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import HeaderParameter, QueryParameter
from litestar.response import Stream
from msgspec import Struct

from plait.events import ids
from plait.events.content import Contents
from plait.events.errors import Code
from plait.events.store import Position, Recorded
from plait.events.types import Content
from plait.services.gateway.call import Call, Gateway, checked
from plait.services.gateway.problems import refusals
from plait.services.gateway.tokens import Cursor
from plait.services.gateway.writes import SessionId

HEARTBEAT_S = 15.0
START = "start"

_HEARTBEAT = b": still here\n\n"
_CAUGHT_UP = b": caught up\n\n"  # what was past is out: who only wants that may go
_MEDIA_TYPE = "text/event-stream"


@get(
    "/v1/sessions/{session_id:str}/events",
    media_type=_MEDIA_TYPE,
    tags=["sessions"],
    summary="The session's events, live",
    description="Server-sent events, one for each event of the log: `id:` its position, `event:` "
    "its type, `data:` its JSON, with the `branch_id` that it happened on or names, `at` in "
    "ms, and texts opened. `Last-Event-ID` goes on after that position without a gap or a repeat; "
    "without, the stream begins now. The comment `caught up` ends what is past; another comes "
    "every 15 s. `event: end` says why the server ends a stream: connect again with "
    "`Last-Event-ID`.\n\n"
    "`event: token` is what a model says while it says it. It has no `id:` and is not sent again; "
    "`data:` is a piece of a step's text, `{turn_id, branch_id, node_id, step, offset, text, done, "
    "restarted}`. The text is what one had up to `offset` (in characters), and then `text`; who "
    "comes in the middle gets first what there is so far. `restarted` says that what one had of "
    "this step is void: the model is asked again, or the turn is over. After `done` "
    "comes the log's event of the step, which is what counts.",
    responses={
        200: ResponseSpec(
            str, generate_examples=False, media_type=_MEDIA_TYPE, description="The stream"
        ),
        **refusals(Code.UNKNOWN_SESSION, Code.BAD_POSITION),
    },
)
async def session_events(
    request: Call,
    session_id: SessionId,
    last_event_id: Annotated[
        str | None,
        HeaderParameter(
            name="Last-Event-ID", description="The `id:` of the last event that you have."
        ),
    ] = None,
    begin: Annotated[
        str,
        QueryParameter(
            name="from",
            description="Without `Last-Event-ID`: `start` replays everything; a position goes on "
            "after it.",
        ),
    ] = "",
) -> Stream:
    gateway, tenant = request.gateway, request.tenant
    await request.of_log(gateway.handler.session(tenant, session_id))
    asked = last_event_id or begin
    end = await request.of_log(gateway.store.last_sequence())
    if asked == START:
        after = Position(gateway.store.generation, 0)
    elif asked:
        after = await checked(gateway, asked)
    else:
        after = Position(gateway.store.generation, end, 1023)
    gateway.tail.check_room()
    return Stream(
        _stream(gateway, tenant, session_id, after, end),
        media_type=_MEDIA_TYPE,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _stream(
    gateway: Gateway, tenant: str, session: str, after: Position, end: int
) -> AsyncIterator[bytes]:
    tail, reader, now = gateway.tail, object(), asyncio.get_running_loop().time
    subscription = tail.listen(tenant, session)
    feed = gateway.feeds.join(tenant, session, reader, lambda: subscription.wake())
    cursor = Cursor(feed, gateway.contents)
    try:
        yield _HEARTBEAT  # the headers go out at once
        while True:
            past_end = max(subscription.joined, end)  # the tail may be a little behind
            if after.sequence < past_end:
                past = gateway.store.follow(
                    max(0, after.sequence - 1), tenant=tenant, session=session
                )
                async with aclosing(past) as batches:
                    async for batch in batches:
                        for recorded in batch.recorded:
                            if recorded.sequence > past_end:
                                break
                            block = await _block(gateway, recorded, after, cursor)
                            if block:
                                yield block
                        if batch.up_to >= past_end:
                            break
                after = max(after, Position(after.generation, past_end, 1023))
            if subscription.ended is None or subscription.stopped:
                break
            # More came meanwhile than the queue holds: read on in the log.
            tail.leave(tenant, session, subscription)
            subscription = tail.listen(tenant, session)
        yield _CAUGHT_UP
        spoke = now()
        recorded_now = None
        while True:
            block = b""
            if recorded_now is not None:
                block = await _block(gateway, recorded_now, after, cursor)
            # Tokens are shown beside the log's present end, not beside what is past.
            if subscription.idle and tail.seen >= past_end:
                block += cursor.fresh()
            if not block and now() - spoke >= HEARTBEAT_S:
                block = _HEARTBEAT
            if block:
                yield block
                spoke = now()
            if subscription.over:
                break
            recorded_now = await subscription.next(HEARTBEAT_S)
        why = msgspec.json.encode({"reason": subscription.ended})
        yield b"event: end\ndata: " + why + b"\n\n"
    finally:
        gateway.feeds.leave(tenant, session, reader)
        tail.leave(tenant, session, subscription)


async def _block(gateway: Gateway, recorded: Recorded, after: Position, cursor: Cursor) -> bytes:
    """The server-sent events of one append that come after the position."""
    blocks: list[bytes] = []
    stream, append = recorded.stream, recorded.append
    own = stream.branch == ids.SESSION_TOKEN
    for index, event in enumerate(append.events):
        position = Position(gateway.store.generation, recorded.sequence, index)
        if position <= after:
            continue
        data = {
            "branch_id": None if own else f"{stream.session}-{stream.branch}",
            "at": append.at,
            **await _opened(event, gateway.contents),
        }
        blocks.append(
            await cursor.before(event)
            + f"id: {position}\nevent: {type(event).__name__}\ndata: ".encode()
            + msgspec.json.encode(data)
            + b"\n\n"
        )
    return b"".join(blocks)


async def _opened(value: Struct, contents: Contents) -> dict[str, Any]:
    """The struct as JSON types, with texts where content was; None for an erased one."""
    return {
        field: await _plain(getattr(value, field), contents) for field in value.__struct_fields__
    }


async def _plain(value: Any, contents: Contents) -> Any:
    if isinstance(value, Content):
        try:
            return await contents.read(value)
        except KeyError:
            return None
    if isinstance(value, Struct):
        return await _opened(value, contents)
    if isinstance(value, tuple):
        return [await _plain(item, contents) for item in value]
    return value


ROUTES = (session_events,)
