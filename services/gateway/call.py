"""One HTTP call: its tenant, its body as the route's type, and what the process has for it."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from litestar import Request

from plait.events import ids
from plait.events.content import Contents
from plait.events.errors import (
    BadPosition,
    Invalid,
    LogGone,
    Unavailable,
    UnknownMessage,
    UnknownNode,
    UnknownSession,
    UnknownTurn,
)
from plait.events.handler import Handler
from plait.events.providers import TenantProviders
from plait.events.settings import Settings
from plait.events.store import EventStore, Position
from plait.events.transcripts import Transcripts
from plait.projections.queries import Queries
from plait.services.gateway.auth import tenant_of
from plait.services.gateway.commands import Commands
from plait.services.gateway.tail import Tail
from plait.services.gateway.tokens import Feeds

# How long a call waits for the log, all that it asks of it together. A replicated log has its next
# leader within seconds, so a call outlasts most of that; after more, whoever waits is better told.
# The log's own patience is longer, since workers keep nobody waiting.
LOG_S = 5.0
REFUSAL_CHARS = 300  # of what a decoder says, which repeats what was sent

T = TypeVar("T")

_Unknown = (UnknownSession, UnknownNode, UnknownTurn, UnknownMessage)

_ENUM = re.compile(r"^Invalid enum value .* - at `\$\.(\w+)`$", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Gateway(NamedTuple):
    """All that a gateway process has; it keeps nothing else between calls."""

    settings: Settings
    store: EventStore
    handler: Handler
    contents: Contents
    transcripts: Transcripts
    queries: Queries
    commands: Commands
    tail: Tail
    feeds: Feeds
    providers: TenantProviders


class Call(Request[Any, Any, Any]):
    @property
    def tenant(self) -> str:
        return tenant_of(self)

    @property
    def gateway(self) -> Gateway:
        gateway: Gateway = self.app.state.gateway
        return gateway

    async def json(self) -> Any:
        """Straight into the route's type: what does not fit is refused with its path."""
        field = self.route_handler.parsed_data_field
        body = await self.body()
        try:
            return msgspec.json.decode(body, type=Any if field is None else field.annotation)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            hint = "; it may hold half of a surrogate pair" if _SURROGATE.search(body) else ""
            told = allowed(str(error), field.annotation if field is not None else Any)
            raise Invalid(f"the body is not what this call takes: {told}{hint}") from None

    async def no_fields(self) -> None:
        """A body, if there is one, is an empty object. Raises Invalid."""
        body = (await self.body()).strip()
        try:
            fits = not body or msgspec.json.decode(body) == {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fits = False
        if not fits:
            raise Invalid("this call takes no body, or an empty object: leave out what it has")

    async def at_least(self, min_position: str) -> Position | None:
        """The position that an answer must cover, from the query or the header. Raises
        BadPosition for one of another log, or beyond this one's end."""
        text = min_position or self.headers.get("plait-position")
        return await checked(self.gateway, text) if text else None

    async def read(
        self,
        query: Callable[[str, str, Position | None], Awaitable[T]],
        of: str,
        at_least: Position | None,
    ) -> T:
        """What the read models say of an id. Before they say that it is unknown they have caught
        up with the log, so that nobody misses what he was told is written. Raises
        ReadModelBehind rather than that."""
        try:
            return await query(self.tenant, of, at_least)
        except _Unknown:
            if ids.parse(of) is None:
                raise  # No log has it.
            store = self.gateway.store
            end = Position(store.generation, await self.of_log(store.last_sequence()))
            if at_least is not None and at_least >= end:
                raise
        return await query(self.tenant, of, end)

    async def of_log(self, asking: Awaitable[T]) -> T:
        """An answer of the log's within LOG_S. Raises Unavailable."""
        return await answered(asking, "try again")

    async def command(self, doing: Awaitable[T]) -> T:
        """A command, done within LOG_S. Raises Unavailable when nobody knows whether it is."""
        again = "send it again"  # a PUT, PATCH or DELETE changes nothing the second time
        if self.method == "POST" and "idempotency-key" in self.headers:
            again = "send it again with the same Idempotency-Key"
        elif self.method == "POST":
            again = "look before you send it again; with an Idempotency-Key that is safe"
        return await answered(doing, f"whether the command was taken is unknown; {again}")

    async def ends(self, future: "asyncio.Future[int]", seconds: float) -> int | None:
        """What the future gives; None when it is late, cancelled, or nobody listens any more."""
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((future, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        return future.result() if future.done() and not future.cancelled() else None

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


async def checked(gateway: Gateway, text: str) -> Position:
    position = Position.parse(text)
    if position.generation != gateway.store.generation:
        raise BadPosition(text, "it belongs to another log")
    if position.sequence > gateway.tail.seen:
        end = await answered(gateway.store.last_sequence(), "try again")
        if position.sequence > end:
            raise BadPosition(text, f"the log ends at sequence {end}")
    return position


def bounded(wait: float, gateway: Gateway) -> float:
    """How long a call waits. Raises Invalid for what is no time, and for more than is allowed."""
    longest = gateway.settings.wait_max_s
    if not math.isfinite(wait) or not 0 <= wait <= longest:
        raise Invalid(f"`wait` is a number of seconds, from 0 to {longest:g}")
    return wait


async def answered(asking: Awaitable[T], otherwise: str) -> T:
    try:
        async with asyncio.timeout(LOG_S):
            return await asking
    except TimeoutError:
        raise Unavailable(f"the log does not answer: {otherwise}") from None
    except LogGone:
        raise
    except Unavailable as error:
        raise Unavailable(f"the log does not answer ({error}): {otherwise}") from error


def allowed(refusal: str, body: Any) -> str:
    """What the decoder says of a body of that type, with the values that are allowed."""
    told = refusal if len(refusal) <= REFUSAL_CHARS else refusal[:REFUSAL_CHARS] + "…"
    place = _ENUM.search(refusal)
    if place is None:
        return told
    values = get_args(get_type_hints(body).get(place[1]))
    return f"{told}; it is one of {', '.join(map(str, values))}"
