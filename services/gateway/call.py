"""One HTTP call: its tenant, its body as the route's type, and what the process has for it."""

import asyncio
import math
import re
from typing import Any, NamedTuple

import msgspec
from litestar import Request

from plait.events.content import Contents
from plait.events.errors import BadPosition, Invalid
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
            raise Invalid(f"the body is not what this call takes: {error}{hint}") from None

    async def at_least(self, min_position: str) -> Position | None:
        """The position that an answer must cover, from the query or the header. Raises
        BadPosition for one of another log, or beyond this one's end."""
        text = min_position or self.headers.get("plait-position")
        return await checked(self.gateway, text) if text else None

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
        end = await gateway.store.last_sequence()
        if position.sequence > end:
            raise BadPosition(text, f"the log ends at sequence {end}")
    return position


def bounded(wait: float, gateway: Gateway) -> float:
    """How long a call may wait. Raises Invalid for what is no time."""
    if not math.isfinite(wait) or wait < 0:
        raise Invalid("`wait` is a number of seconds, 0 or more")
    return min(wait, gateway.settings.wait_max_s)
