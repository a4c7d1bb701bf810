"""Loads what a model sees: folded branches in a bounded cache, read on from where they end.

Used at the edges: by `turns` for each model call, by the gateway to show a context.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence

from plait.events import ids
from plait.events.content import Contents
from plait.events.context import (
    ContextItem,
    Segment,
    Transcript,
    contents,
    context,
    fold,
    holds,
)
from plait.events.errors import UnknownNode, UnknownSession
from plait.events.store import Batch, EventStore, Recorded, StreamId
from plait.events.subjects import stream_of
from plait.events.types import Append, Content, SessionCreated, ToolCall, TurnSuspended

CACHED_BYTES = 128 * 1024 * 1024
EMPTY_BYTES = 2_000  # what a folded branch costs before its first node
SESSIONS_CACHED = 10_000
OPENED_AT_ONCE = 16  # blobs


class Transcripts:
    """Contexts of any head. `cached_bytes` bounds the folded branches that are kept."""

    def __init__(
        self, store: EventStore, contents: Contents, *, cached_bytes: int = CACHED_BYTES
    ) -> None:
        self._store, self._contents = store, contents
        self._kept: OrderedDict[StreamId, _Kept] = OrderedDict()
        self._size = 0
        self._cached_bytes = cached_bytes
        self._sessions: OrderedDict[tuple[str, str], SessionCreated] = OrderedDict()

    def watching(self) -> EventStore:
        """The store, for a handler beside this: whatever that reads or appends need not be read
        again here."""
        return _Watched(self._store, self)

    async def session(self, tenant: str, session_id: str) -> SessionCreated:
        """What a session began with: that never changes. Raises UnknownSession."""
        key = (tenant, session_id)
        created = self._sessions.get(key)
        if created is not None:
            self._sessions.move_to_end(key)
            return created
        for recorded in await self._store.read(StreamId(tenant, session_id, ids.SESSION_TOKEN)):
            for event in recorded.append.events:
                if isinstance(event, SessionCreated):
                    while len(self._sessions) >= SESSIONS_CACHED:
                        self._sessions.popitem(last=False)
                    self._sessions[key] = event
                    return event
        raise UnknownSession(session_id)

    async def context(self, tenant: str, head: str, *, known: int = 0) -> tuple[ContextItem, ...]:
        """What a model would see at `head`, as of now.

        `known`: the caller needs the head's branch only up to this sequence of it, so that
        nothing is read when it is at hand. Raises UnknownNode.
        """
        ref = ids.of_kind(head, "node")
        if ref is None:
            raise UnknownNode(head)
        try:
            session = await self.session(tenant, ref.session)
        except UnknownSession:
            raise UnknownNode(head) from None
        root = ids.root_id(ref.session)
        chain: list[Segment] = []
        node, before = head, 0
        while node != root:
            transcript = await self._transcript(stream_of(tenant, node), before or known)
            segment = Segment(transcript, node, before)
            if ids.session_of(node) != ref.session or not holds(segment):
                raise UnknownNode(head if segment.head == head else node)
            chain.append(segment)
            # Each fork is older than what it is the fork of, so this comes to an end.
            node, before = transcript.fork, transcript.opened
        return context(chain[::-1], session.system_prompt)

    async def call(self, tenant: str, tool_node: str, *, known: int = 0) -> ToolCall:
        """A tool call as the model made it. Raises UnknownNode."""
        transcript = await self._transcript(stream_of(tenant, tool_node), known)
        call = transcript.call(tool_node)
        if call is None:
            raise UnknownNode(tool_node)
        return call

    async def open(self, items: Sequence[ContextItem]) -> dict[str, str]:
        """The items' texts by the digest of their content."""
        texts: dict[str, str] = {}
        apart: list[Content] = []
        for digest, content in contents(items).items():
            if content.data is None:
                apart.append(content)
            else:
                texts[digest] = await self._contents.read(content)
        slots = asyncio.Semaphore(OPENED_AT_ONCE)

        async def fetch(content: Content) -> None:
            async with slots:
                texts[content.digest] = await self._contents.read(content)

        await asyncio.gather(*map(fetch, apart))
        return texts

    async def _transcript(self, stream: StreamId, known: int) -> Transcript:
        kept = self._keep(stream)
        if not known or kept.read_to < known:
            recorded = await self._store.read(stream, kept.transcript.version)
            self._fold(stream, kept, recorded)
            kept.read_to = max(kept.read_to, known, kept.transcript.version)
        return kept.transcript

    def _keep(self, stream: StreamId) -> "_Kept":
        kept = self._kept.get(stream)
        if kept is None:
            kept = self._kept[stream] = _Kept()
            self._size += EMPTY_BYTES
        else:
            self._kept.move_to_end(stream)
        return kept

    def _fold(self, stream: StreamId, kept: "_Kept", recorded: Sequence[Recorded]) -> None:
        before = kept.transcript.size_bytes
        for one in recorded:
            fold(kept.transcript, one)
        if self._kept.get(stream) is not kept:
            return  # Evicted meanwhile: its reader has it still.
        self._size += kept.transcript.size_bytes - before
        while self._size > self._cached_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._size -= gone.transcript.size_bytes

    def _saw(self, stream: StreamId, after: int, recorded: Sequence[Recorded]) -> None:
        """Takes in what a handler read or appended, if nothing is missing before it."""
        if stream.branch == ids.SESSION_TOKEN or not recorded:
            return
        if isinstance(recorded[-1].append.events[-1], TurnSuspended):
            # A wait can be long, and there may be many: it holds no memory here either.
            gone = self._kept.pop(stream, None)
            self._size -= gone.transcript.size_bytes if gone is not None else 0
            return
        kept = self._kept.get(stream)
        version = kept.transcript.version if kept is not None else 0
        if after > version or recorded[-1].sequence <= version:
            return
        kept = self._keep(stream)
        self._fold(stream, kept, recorded)
        kept.read_to = max(kept.read_to, kept.transcript.version)


class _Kept:
    """A transcript, and up to where the log is known to have nothing else for it."""

    __slots__ = ("read_to", "transcript")

    def __init__(self) -> None:
        self.transcript = Transcript(size_bytes=EMPTY_BYTES)
        self.read_to = 0


class _Watched:
    """A store whose reader and writer of branches is seen by transcripts."""

    def __init__(self, store: EventStore, transcripts: Transcripts) -> None:
        self._store, self._transcripts = store, transcripts

    @property
    def generation(self) -> int:
        return self._store.generation

    async def append(self, stream: StreamId, append: Append, expected: int) -> int:
        sequence = await self._store.append(stream, append, expected)
        self._transcripts._saw(stream, expected, [Recorded(stream, sequence, append)])
        return sequence

    async def read(self, stream: StreamId, after: int = 0) -> Sequence[Recorded]:
        recorded = await self._store.read(stream, after)
        self._transcripts._saw(stream, after, recorded)
        return recorded

    async def read_at(self, sequence: int) -> Recorded | None:
        return await self._store.read_at(sequence)

    async def branches(self, tenant: str, session: str) -> Sequence[str]:
        return await self._store.branches(tenant, session)

    async def last_sequence(self) -> int:
        return await self._store.last_sequence()

    def follow(
        self, after: int = 0, *, tenant: str | None = None, session: str | None = None
    ) -> AsyncGenerator[Batch, None]:
        return self._store.follow(after, tenant=tenant, session=session)

    async def close(self) -> None:
        await self._store.close()
