"""The bench as a client of the log: it asks by commands, and sees in the log what became of it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from itertools import count
from typing import NamedTuple

from plait.events import ids
from plait.events.commands import ClaimTurn, CreateSession, PostMessage, RecordAnswer
from plait.events.content import Contents
from plait.events.errors import StaleClaim
from plait.events.handler import Handler
from plait.events.jetstream_setup import JetStream, open_jetstream
from plait.events.settings import Settings
from plait.events.types import (
    AnyEvent,
    MessageReceived,
    Pins,
    TurnClaimed,
    TurnEnded,
    TurnSuspended,
)

PATIENCE_S = 120.0  # what takes longer is broken
HOLD_TRIES = 20
OURS = 1_000_000  # the delivery under which the bench claims a turn: no worker's is greater


class Seen(NamedTuple):
    at: float  # perf_counter when it reached us
    event: TurnClaimed | TurnSuspended | TurnEnded


class Driver:
    """`async with driver(settings) as plait`. The tenant is the settings' one."""

    def __init__(self, jetstream: JetStream, settings: Settings) -> None:
        self.jetstream, self.settings = jetstream, settings
        self._tenant = settings.tenant
        self._handler = Handler(jetstream.store, settings.limits)
        self._contents = Contents(jetstream.keys, jetstream.blobs, settings.limits)
        self._numbers = count()
        self._run = time.time_ns()
        self._seen: dict[tuple[type, str], list[Seen]] = {}
        self._waiting: dict[tuple[type, str, int], asyncio.Future[Seen]] = {}

    def _id(self) -> str:
        return f"bench.{self._run}.{next(self._numbers)}"

    async def session(self, model: str | None = None) -> str:
        command = self._id()
        session = ids.session_id(command)
        await self._contents.create_key(self._tenant, session)
        await self._handler.execute(
            self._tenant,
            CreateSession(command_id=command, at=_now(), session_id=session, model=model),
        )
        return session

    def new_branch(self, session: str) -> str:
        return ids.branch_id(session, self._id())

    async def post(self, branch: str, text: str) -> str:
        """Opens the branch at ROOT if need be. Returns the turn that it asks for."""
        session = ids.session_of(branch)
        done = await self._handler.execute(
            self._tenant,
            PostMessage(
                command_id=self._id(),
                at=_now(),
                branch_id=branch,
                content=await self._contents.write(text, self._tenant, session),
                fork=ids.root_id(session),
            ),
        )
        for event in done.events:
            if isinstance(event, MessageReceived) and event.turn_id is not None:
                return event.turn_id
        raise RuntimeError(f"{branch} was asked for a turn, and says {done.events}")

    async def hold(self, branch: str) -> str:
        """A turn that runs and does not end: the bench itself claims it, like a worker."""
        for _ in range(HOLD_TRIES):
            turn = await self.post(branch, "wait until everybody has asked")
            claim = ClaimTurn(
                command_id=self._id(),
                at=_now(),
                branch_id=branch,
                turn_id=turn,
                epoch=(1, OURS),
                worker="bench",
                pins=Pins(model="bench"),
            )
            with contextlib.suppress(StaleClaim):  # a real worker was so quick that it has ended
                await self._handler.execute(self._tenant, claim)
                return turn
        raise RuntimeError(f"no turn of {branch} could be held")

    async def let_go(self, turn: str) -> None:
        """Ends a held turn, so that its branch reads its inbox."""
        branch = ids.branch_of(turn)
        await self._handler.execute(
            self._tenant,
            RecordAnswer(
                command_id=self._id(),
                at=_now(),
                branch_id=branch,
                turn_id=turn,
                epoch=(1, OURS),
                context="0" * 64,
                text=await self._contents.write("done", self._tenant, ids.session_of(branch)),
            ),
        )

    async def until(
        self,
        kind: type[TurnClaimed] | type[TurnSuspended] | type[TurnEnded],
        turn: str,
        times: int = 1,
    ) -> Seen:
        """The so many-th event of this kind that the turn has had. Raises TimeoutError."""
        seen = self._seen.get((kind, turn), [])
        if len(seen) >= times:
            return seen[times - 1]
        key = (kind, turn, times)
        future = self._waiting.get(key)
        if future is None:
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.shield(future)

    async def completed(self, turn: str) -> Seen:
        """The turn's end. Raises RuntimeError when it did not end well."""
        seen = await self.until(TurnEnded, turn)
        if not isinstance(seen.event, TurnEnded) or seen.event.status != "completed":
            raise RuntimeError(f"turn {turn} did not complete: {seen.event}")
        return seen

    async def follow(self, after: int) -> None:
        async for batch in self.jetstream.store.follow(after):
            at = time.perf_counter()
            for recorded in batch.recorded:
                for event in recorded.append.events:
                    self._see(at, event)

    def _see(self, at: float, event: AnyEvent) -> None:
        if not isinstance(event, TurnClaimed | TurnSuspended | TurnEnded):
            return
        seen = self._seen.setdefault((type(event), event.turn_id), [])
        seen.append(Seen(at, event))
        future = self._waiting.pop((type(event), event.turn_id, len(seen)), None)
        if future is not None:
            future.set_result(seen[-1])


@contextlib.asynccontextmanager
async def driver(settings: Settings) -> AsyncIterator[Driver]:
    jetstream = await open_jetstream(settings, "plait-bench")
    following: asyncio.Task[None] | None = None
    try:
        plait = Driver(jetstream, settings)
        following = asyncio.create_task(plait.follow(await jetstream.store.last_sequence()))
        yield plait
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await jetstream.close()


def _now() -> int:
    return time.time_ns() // 1_000_000
