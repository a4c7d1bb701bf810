"""A Plait in memory for tests: the real domain, handler and replies on the in-memory log."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from plait.events import ids
from plait.events.commands import (
    AnyCommand,
    ArchiveBranch,
    ClaimTurn,
    CreateSession,
    PostMessage,
    RecordAnswer,
    RecordResults,
    ToolSend,
)
from plait.events.content import Contents
from plait.events.handler import Done, Handler
from plait.events.limits import Limits
from plait.events.memory import (
    MemoryBlobs,
    MemoryKeys,
    MemoryLeases,
    MemoryStore,
    MemoryWorkQueue,
)
from plait.events.settings import Settings
from plait.events.types import Pins, ToolCall
from plait.services.replies.service import Replies

TENANT = "t"
START = 1_700_000_000_000


class World:
    """One log, one clock that only tests move, and as many `replies` as a test starts."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.settings = Settings(limits=self.limits)
        self.ms = START
        self.store = MemoryStore()
        self.contents = Contents(MemoryKeys(), MemoryBlobs(), self.limits)
        self.handler = Handler(self.store, self.limits)
        self.work = MemoryWorkQueue()
        self.leases = MemoryLeases(lambda: self.ms / 1000)
        self._ids = count(1)

    def id(self) -> str:
        return f"c{next(self._ids)}"

    async def do(self, command: AnyCommand, tenant: str = TENANT) -> Done:
        return await self.handler.execute(tenant, command)

    @asynccontextmanager
    async def replies(self, holder: str = "one") -> AsyncIterator[Replies]:
        """A process of its own: its own handler and cache."""
        replies = Replies(
            self.store,
            Handler(self.store, self.limits),
            self.contents,
            self.work,
            self.leases,
            self.settings,
            holder,
            lambda: self.ms,
        )
        task = asyncio.create_task(replies.run())
        try:
            yield replies
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def session(self) -> str:
        command_id = self.id()
        session = ids.session_id(command_id)
        await self.contents.create_key(TENANT, session)
        await self.do(CreateSession(command_id=command_id, at=self.ms, session_id=session))
        return session

    async def branch(self, session: str, *, words: str = "hello", run: bool = False) -> str:
        """A new branch at ROOT whose first message is there."""
        branch = ids.branch_id(session, self.id())
        await self.post(branch, words, run=run)
        return branch

    async def post(self, branch: str, words: str, *, run: bool = True) -> Done:
        session = ids.session_of(branch)
        return await self.do(
            PostMessage(
                command_id=self.id(),
                at=self.ms,
                branch_id=branch,
                content=await self.contents.write(words, TENANT, session),
                run=run,
                fork=ids.root_id(session),
            )
        )

    async def archive(self, branch: str) -> Done:
        return await self.do(
            ArchiveBranch(command_id=self.id(), at=self.ms, branch_id=branch, archived=True)
        )

    async def claim(self, branch: str, delivery: int = 1) -> str:
        """Claims the branch's present turn. Returns its id."""
        turn = (await self.handler.branch(TENANT, branch)).turn
        assert turn is not None, f"{branch} has no turn"
        await self.do(
            ClaimTurn(
                command_id=self.id(),
                at=self.ms,
                branch_id=branch,
                turn_id=turn.id,
                epoch=(turn.n, delivery),
                worker="w",
                pins=Pins(model="offline:echo"),
            )
        )
        return turn.id

    async def answer(self, branch: str, words: str, *calls: str) -> tuple[str, ...]:
        """The model's answer for the running turn. Returns the call nodes."""
        turn = (await self.handler.branch(TENANT, branch)).turn
        assert turn is not None, f"{branch} has no turn"
        session = ids.session_of(branch)
        nodes = tuple(ids.node_id(branch, turn.id, str(turn.steps), name) for name in calls)
        args = await self.contents.write("{}", TENANT, session)
        await self.do(
            RecordAnswer(
                command_id=self.id(),
                at=self.ms,
                branch_id=branch,
                turn_id=turn.id,
                epoch=turn.epoch,
                context="digest",
                text=await self.contents.write(words, TENANT, session),
                calls=tuple(
                    ToolCall(node, name, args) for node, name in zip(nodes, calls, strict=True)
                ),
            )
        )
        return nodes

    async def send(
        self, branch: str, target: str, words: str, *, wait_s: float | None = None
    ) -> str:
        """The running turn sends, and suspends when it waits. Returns the message's id."""
        (node,) = await self.answer(branch, "", f"send-{next(self._ids)}")
        turn = (await self.handler.branch(TENANT, branch)).turn
        assert turn is not None, f"{branch} has no turn"
        session = ids.session_of(branch)
        accepted = await self.contents.write("accepted", TENANT, session)
        send = ToolSend(
            node,
            target,
            await self.contents.write(words, TENANT, session),
            ids.short(branch),
            None if wait_s else accepted,
            None if wait_s is None else self.ms + int(wait_s * 1000),
        )
        await self.do(
            RecordResults(
                command_id=self.id(),
                at=self.ms,
                branch_id=branch,
                turn_id=turn.id,
                epoch=turn.epoch,
                sends=(send,),
            )
        )
        return ids.message_id(branch, node)
