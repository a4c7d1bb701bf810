"""load → decide → append, and again on a conflict: the only way in which anything is written.

A decision that would append nothing, or refuse, is taken on a state read from the leader, never
on a cached one (P4). One command at a time per stream and process; between processes the
expected version decides.
"""

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from plait.events import branch as branches
from plait.events import ids
from plait.events import session as sessions
from plait.events.branch import Branch
from plait.events.commands import AnyBranchCommand, AnyCommand, AnySessionCommand, SessionCommand
from plait.events.errors import (
    BudgetExceeded,
    PlaitError,
    UnknownBranch,
    UnknownSession,
    VersionConflict,
)
from plait.events.limits import Limits
from plait.events.session import Session
from plait.events.store import EventStore, Recorded, StreamId
from plait.events.subjects import stream_of
from plait.events.types import AnyEvent, Append

ATTEMPTS = 64  # lost races of one command before the caller hears of it


class Done(NamedTuple):
    """What a command did. `sequence` covers it, also when an earlier attempt had done it."""

    sequence: int
    events: tuple[AnyEvent, ...]


class Handler:
    """Executes commands on one log; keeps folded streams in a bounded cache.

    The states that it returns are the cache's own: read them before the next await on the same
    stream, and never change them.
    """

    def __init__(self, store: EventStore, limits: Limits, *, cached: int = 1_000) -> None:
        self.store, self.limits = store, limits
        self._states: OrderedDict[StreamId, Session | Branch] = OrderedDict()
        self._locks: dict[StreamId, asyncio.Lock] = {}
        self._users: dict[StreamId, int] = {}
        self._cached = cached

    async def session(self, tenant: str, session_id: str) -> Session:
        """The state of a session as of now. Raises UnknownSession."""
        if ids.of_kind(session_id, "session") is None:
            raise UnknownSession(session_id)
        state = await self._load(StreamId(tenant, session_id, ids.SESSION_TOKEN))
        assert isinstance(state, Session)
        if not state.exists:
            raise UnknownSession(session_id)
        return state

    async def branch(self, tenant: str, branch_id: str) -> Branch:
        """The state of an open branch as of now. Raises UnknownBranch."""
        state = await self.peek(tenant, branch_id)
        if not state.exists:
            raise UnknownBranch(branch_id)
        return state

    async def peek(self, tenant: str, branch_id: str) -> Branch:
        """Like `branch`, but an unopened branch is an empty state."""
        if ids.of_kind(branch_id, "branch") is None:
            raise UnknownBranch(branch_id)
        state = await self._load(stream_of(tenant, branch_id))
        assert isinstance(state, Branch)
        return state

    async def execute(self, tenant: str, command: AnyCommand) -> Done:
        """Raises what `decide` refuses with, and Unavailable when the log does not answer."""
        if isinstance(command, SessionCommand):
            stream = StreamId(tenant, command.session_id, ids.SESSION_TOKEN)
        else:
            stream = stream_of(tenant, command.branch_id)
        async with self._lock(stream):
            state, fresh = self._cached_state(stream), False
            for _ in range(ATTEMPTS):
                try:
                    events = self._decide(command, state)
                except PlaitError:
                    if fresh:
                        raise
                    events = []
                if not events:
                    if fresh:
                        done = state.done_at(command.command_id)
                        return Done(state.version if done is None else done, ())
                    await self._catch_up(stream, state)
                    fresh = True
                    continue
                append = Append(
                    command_id=command.command_id,
                    at=command.at,
                    events=tuple(events),
                    root=command.root or command.command_id,
                    cause=command.cause,
                )
                try:
                    sequence = await self.store.append(stream, append, state.version)
                except VersionConflict:
                    await self._catch_up(stream, state)
                    fresh = True
                    continue
                self._evolve(state, Recorded(stream, sequence, append))
                return Done(sequence, append.events)
            raise VersionConflict(state.version)

    def _decide(self, command: AnyCommand, state: Session | Branch) -> list[AnyEvent]:
        events: list[AnyEvent]
        if isinstance(state, Session):
            assert isinstance(command, AnySessionCommand)
            events = [*sessions.decide(command, state, self.limits)]
        else:
            assert isinstance(command, AnyBranchCommand)
            events = [*branches.decide(command, state, self.limits)]
        if len(events) > self.limits.append_events:
            raise BudgetExceeded("events of one append", len(events), self.limits.append_events)
        return events

    async def _load(self, stream: StreamId) -> Session | Branch:
        async with self._lock(stream):
            state = self._cached_state(stream)
            await self._catch_up(stream, state)
            return state

    async def _catch_up(self, stream: StreamId, state: Session | Branch) -> None:
        for recorded in await self.store.read(stream, state.version):
            self._evolve(state, recorded)

    def _evolve(self, state: Session | Branch, recorded: Recorded) -> None:
        if isinstance(state, Session):
            sessions.evolve(state, recorded)
        else:
            branches.evolve(state, recorded, self.limits)

    def _cached_state(self, stream: StreamId) -> Session | Branch:
        state = self._states.get(stream)
        if state is None:
            while len(self._states) >= self._cached:
                self._states.popitem(last=False)
            if stream.branch == ids.SESSION_TOKEN:
                state = Session(id=stream.session)
            else:
                state = Branch(id=f"{stream.session}-{stream.branch}")
            self._states[stream] = state
        else:
            self._states.move_to_end(stream)
        return state

    def _lock(self, stream: StreamId) -> "_StreamLock":
        return _StreamLock(self._locks, self._users, stream)


class _StreamLock:
    """One lock per stream in use; gone with its last user."""

    def __init__(
        self,
        locks: dict[StreamId, asyncio.Lock],
        users: dict[StreamId, int],
        stream: StreamId,
    ) -> None:
        self._locks, self._users, self._stream = locks, users, stream

    async def __aenter__(self) -> None:
        self._users[self._stream] = self._users.get(self._stream, 0) + 1
        try:
            await self._locks.setdefault(self._stream, asyncio.Lock()).acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._locks[self._stream].release()
        self._leave()

    def _leave(self) -> None:
        self._users[self._stream] -= 1
        if not self._users[self._stream]:
            del self._users[self._stream], self._locks[self._stream]
