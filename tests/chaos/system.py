"""A whole Plait of real processes, its log as it grows, a client that retries, and our workers."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx

from plait.events import ids
from plait.events.content import Contents
from plait.events.jetstream_setup import JetStream, open_jetstream
from plait.events.limits import Limits
from plait.events.settings import Settings
from plait.events.store import Recorded
from plait.events.types import AnyEvent, TurnClaimed, TurnEnded
from plait.services.dev.child import Child
from plait.services.dev.stack import SERVICES, Stack
from tests.chaos.director import Director, directing
from tests.chaos.scripted_worker import MODEL, SOCKET
from tests.waiting import until

ROOT = Path(__file__).parents[2]
OURS = tuple(name for name in SERVICES if name != "turns")  # turns run in scripted workers
AGAIN = (429, 503)  # answers after which a client asks again

E = TypeVar("E")


class Seen(NamedTuple):
    at: float  # monotonic, when it reached us
    recorded: Recorded


class Watch:
    """The log as it grows. It follows through every restart of the server, and would fail if an
    append that it has seen were gone."""

    def __init__(self, jetstream: JetStream) -> None:
        self.jetstream = jetstream
        self.contents = Contents(jetstream.keys, jetstream.blobs, Limits())
        self.seen: list[Seen] = []
        self.up_to = 0

    async def follow(self) -> None:
        async with contextlib.aclosing(self.jetstream.store.follow()) as batches:
            async for batch in batches:
                at = time.monotonic()
                self.seen += [Seen(at, recorded) for recorded in batch.recorded]
                self.up_to = batch.up_to

    async def caught_up(self) -> None:
        end = await self.jetstream.store.last_sequence()
        await until(lambda: self.up_to >= end)

    def events(self, kind: type[E], **fields: object) -> list[E]:
        return [event for _, event in self.timed(kind, **fields)]

    def timed(self, kind: type[E], **fields: object) -> list[tuple[float, E]]:
        return [
            (seen.at, event)
            for seen in self.seen
            for event in seen.recorded.append.events
            if isinstance(event, kind)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def until(self, kind: type[E], nth: int = 1, within_s: float = 30, **fields: object) -> E:
        """The nth such event."""
        await until(lambda: len(self.events(kind, **fields)) >= nth, within_s=within_s)
        return self.events(kind, **fields)[nth - 1]

    async def completed(self, turn: str, within_s: float = 30) -> None:
        """The turn has ended once, and well."""
        await self.until(TurnEnded, within_s=within_s, turn_id=turn)
        await self.caught_up()
        ends: Sequence[AnyEvent] = self.events(TurnEnded, turn_id=turn)
        assert [(end.status, end.error) for end in ends] == [("completed", None)]  # type: ignore[union-attr]


class Client:
    """Asks again, with the same Idempotency-Key, until it is answered."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False
        )
        self._keys = (f"chaos-{time.time_ns()}-{number}" for number in count())

    async def ready(self) -> None:
        async def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await self.http.get("/readyz")).status_code == 200
            return False

        await until(answers, within_s=60)

    async def get(self, path: str, **query: object) -> Any:
        return await self.acknowledged("GET", path, params=query)

    async def post(self, path: str, body: object) -> Any:
        headers = {"Idempotency-Key": next(self._keys)}
        return await self.acknowledged("POST", path, json=body, headers=headers)

    async def acknowledged(self, method: str, path: str, within_s: float = 60, **more: Any) -> Any:
        """Again with the same words until the answer is neither lost nor a "later"."""
        answers: list[httpx.Response] = []

        async def answered() -> bool:
            try:
                answer = await self.http.request(method, path, **more)
            except httpx.TransportError:
                return False
            if answer.status_code in AGAIN:
                return False
            answers.append(answer)
            return True

        await until(answered, within_s=within_s)
        assert answers[0].status_code < 300, answers[0].text
        return answers[0].json()

    async def session(self) -> str:
        made: str = (await self.post("/v1/sessions", {}))["session_id"]
        return made

    async def branch(self, session: str, name: str) -> str:
        """Opens a branch of this name at ROOT."""
        opening = {"text": f"you are {name}", "run": False, "after": ids.root_id(session)}
        posted = await self.post(f"/v1/sessions/{session}/messages", opening)
        path = f"/v1/sessions/{session}/branches/{posted['branch_id']}"
        await self.acknowledged("PATCH", path, json={"name": name})
        branch_id: str = posted["branch_id"]
        return branch_id

    async def say(self, session: str, text: str, **body: object) -> Any:
        return await self.post(f"/v1/sessions/{session}/messages", {"text": text, **body})

    async def turn(self, session: str, text: str, **body: object) -> str:
        asked: str = (await self.say(session, text, **body))["turn_id"]
        return asked


class Chaos(Client):
    """A stack without turns, whose workers the test starts, and a client of it."""

    def __init__(self, data: Path, stack: Stack, watch: Watch, director: Director) -> None:
        super().__init__(stack.url, stack.key)
        self.data, self.stack, self.watch, self.director = data, stack, watch, director
        self.workers: dict[int, Child] = {}
        self._logs: dict[int, Path] = {}
        self._numbers = count(1)

    # -- workers -----------------------------------------------------------------------------

    async def start_workers(self, number: int) -> list[int]:
        """The process ids of scripted workers, once they take turns."""
        pids = [await self.start_worker() for _ in range(number)]
        await until(lambda: all(map(self._is_ready, pids)), within_s=30)
        return pids

    def _is_ready(self, pid: int) -> bool:
        return '"event": "ready"' in self.log_of(pid)

    async def start_worker(self) -> int:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "PLAIT_NATS_URL": self.stack.nats_url,
            "PLAIT_NATS_MONITOR_URL": self.stack.monitor_url,
            "PLAIT_REDIS_URL": self.stack.redis_url,
            "PLAIT_MODEL": MODEL,
            SOCKET: str(self.data / "script"),
        }
        path = self.data / f"worker{next(self._numbers)}.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            child = await Child.start(
                [sys.executable, "-m", "tests.chaos.scripted_worker"], env=env, log=log
            )
        finally:
            os.close(log)
        self.workers[child.pid], self._logs[child.pid] = child, path
        return child.pid

    def log_of(self, pid: int) -> str:
        return self._logs[pid].read_text()

    async def kill_worker(self, pid: int) -> float:
        """The moment at which it was killed."""
        at = time.monotonic()
        await self.workers.pop(pid).kill()
        return at

    async def kill_workers(self) -> None:
        await asyncio.gather(*(child.kill() for child in self.workers.values()))
        self.workers.clear()

    def take_over_s(self, turn: str, killed: float, nth: int = 2) -> float:
        return self.watch.timed(TurnClaimed, turn_id=turn)[nth - 1][0] - killed

    # -- services ----------------------------------------------------------------------------

    async def killed(self, *names: str) -> None:
        """kill -9 at once, and until other processes have taken their places. `turns` stands for
        all workers."""
        before = {name: pid for name, pid in self.stack.pids.items() if name in names}
        workers = [*self.workers] if "turns" in names else []
        for pid in (*before.values(), *workers):
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            await self.kill_worker(pid)
            await self.start_worker()

        def replaced() -> bool:
            now = self.stack.pids
            return all(now.get(name, pid) != pid for name, pid in before.items())

        await until(replaced)


@asynccontextmanager
async def chaos(data: Path, services: Sequence[str] = OURS) -> AsyncIterator[Chaos]:
    """Without turns: their workers are the test's to start."""
    async with (
        directing(data / "script") as director,
        Stack(data / "plait", model=MODEL, services=services) as stack,
        watching(settings_of(stack)) as watch,
    ):
        chaos = Chaos(data, stack, watch, director)
        try:
            yield chaos
        finally:
            await chaos.kill_workers()
            await chaos.http.aclose()


def settings_of(stack: Stack) -> Settings:
    return Settings(
        nats_url=stack.nats_url, nats_monitor_url=stack.monitor_url, redis_url=stack.redis_url
    )


@asynccontextmanager
async def watching(settings: Settings) -> AsyncIterator[Watch]:
    jetstream = await open_jetstream(settings, "chaos-watch")
    following: asyncio.Task[None] | None = None
    try:
        watch = Watch(jetstream)
        following = asyncio.create_task(watch.follow())
        yield watch
        assert not following.done(), following
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await jetstream.close()


async def stopped(pid: int) -> None:
    """SIGSTOP, and until no thread of it runs any more."""
    os.kill(pid, signal.SIGSTOP)

    def rests() -> bool:
        tasks = Path(f"/proc/{pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    await until(rests)
