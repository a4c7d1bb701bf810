"""The turns worker on real NATS: it takes, runs, survives being killed, and stops cleanly."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from plait.events import ids
from plait.events.commands import CreateSession, PostMessage
from plait.events.content import Contents
from plait.events.handler import Handler
from plait.events.jetstream_setup import JetStream, open_jetstream
from plait.events.limits import Limits
from plait.events.settings import Settings
from plait.services.turns import worker
from plait.services.turns.models import Answer, AskedCall, ChatModel, Request
from plait.services.turns.tools import Tool
from tests.waiting import until
from tests.world import START, TENANT


class Bench:
    """What posts and looks, beside the worker."""

    def __init__(self, jetstream: JetStream, settings: Settings) -> None:
        self.jetstream, self.settings = jetstream, settings
        self.handler = Handler(jetstream.store, settings.limits)
        self.contents = Contents(jetstream.keys, jetstream.blobs, settings.limits)
        self._made = 0

    def id(self) -> str:
        self._made += 1
        return f"{self.settings.prefix}.{self._made}"

    async def session(self, model: str = "offline:echo") -> str:
        command_id = self.id()
        session = ids.session_id(command_id)
        await self.contents.create_key(TENANT, session)
        await self.handler.execute(
            TENANT,
            CreateSession(command_id=command_id, at=START, session_id=session, model=model),
        )
        return session

    async def post(self, session: str, words: str, *, offer: bool = True) -> str:
        """A message on a branch of its own. Returns its turn."""
        branch = ids.branch_id(session, self.id())
        await self.handler.execute(
            TENANT,
            PostMessage(
                command_id=self.id(),
                at=START,
                branch_id=branch,
                content=await self.contents.write(words, TENANT, session),
                fork=ids.root_id(session),
            ),
        )
        turn = (await self.handler.branch(TENANT, branch)).turn
        assert turn is not None
        if offer:
            await self.jetstream.work.offer(TENANT, turn.id, 1)
        return turn.id

    async def status(self, turn: str) -> str | None:
        branch = await self.handler.branch(TENANT, ids.branch_of(turn))
        return branch.turn_status(turn)

    async def ended(self, turn: str, within_s: float = 20.0) -> str:
        branch = ids.branch_of(turn)

        async def ended() -> bool:
            return turn in (await self.handler.branch(TENANT, branch)).ended

        await until(ended, within_s=within_s)
        return (await self.handler.branch(TENANT, branch)).ended[turn]

    async def queued(self) -> int:
        js = self.jetstream.nc.jetstream()
        return (await js.stream_info(self.jetstream.subjects.work)).state.messages

    async def parked(self) -> int:
        js = self.jetstream.nc.jetstream()
        return (await js.stream_info(self.jetstream.subjects.parked)).state.messages


@pytest.fixture
async def bench(settings: Settings) -> AsyncIterator[Bench]:
    jetstream = await open_jetstream(settings, "test-turns")
    try:
        yield Bench(jetstream, settings)
    finally:
        await jetstream.close()


@asynccontextmanager
async def running(
    settings: Settings, models: dict[str, ChatModel] | None = None, tools: tuple[Tool, ...] = ()
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run(settings, models or {}, tools))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Together:
    """Answers nobody before as many turns as it waits for are there."""

    def __init__(self, turns: int) -> None:
        self.turns, self.present, self.all_there = turns, 0, asyncio.Event()

    async def answer(self, request: Request) -> Answer:
        self.present += 1
        if self.present == self.turns:
            self.all_there.set()
        await self.all_there.wait()
        return Answer("here")


async def test_an_echo_comes_back_and_its_item_is_gone(bench: Bench) -> None:
    turn = await bench.post(await bench.session(), "hello")
    async with running(bench.settings):
        assert await bench.ended(turn) == "completed"
        await until(lambda: empty(bench))


async def empty(bench: Bench) -> bool:
    return await bench.queued() == 0


async def test_as_many_turns_run_at_once_as_are_allowed(bench: Bench) -> None:
    session = await bench.session("test:together")
    turns = [await bench.post(session, f"m{number}") for number in range(200)]
    settings = msgspec.structs.replace(bench.settings, turns_at_once=200)
    async with running(settings, {"test:together": Together(200)}):
        assert {await bench.ended(turn) for turn in turns} == {"completed"}


async def test_a_full_worker_leaves_work_to_others_and_loses_none(bench: Bench) -> None:
    session = await bench.session("test:together")
    turns = [await bench.post(session, f"m{number}") for number in range(24)]
    settings = msgspec.structs.replace(bench.settings, turns_at_once=12)
    model = Together(24)
    async with running(settings, {"test:together": model}):
        await until(lambda: model.present == 12)
        async with running(settings, {"test:together": model}):
            assert {await bench.ended(turn) for turn in turns} == {"completed"}
            await until(lambda: empty(bench))
    assert model.present == 24, "no turn was asked for twice"


async def test_a_turn_longer_than_the_queues_patience_is_not_taken_over(bench: Bench) -> None:
    turn = await bench.post(await bench.session("test:slow"), "hello")
    asked: list[Request] = []

    class Slow:
        async def answer(self, request: Request) -> Answer:
            asked.append(request)
            await asyncio.sleep(worker.ACK_WAIT_S + 1.0)
            return Answer("at last")

    async with running(bench.settings, {"test:slow": Slow()}):
        assert await bench.ended(turn) == "completed"
    assert len(asked) == 1


async def test_an_item_that_is_none_is_parked_and_blocks_nobody(bench: Bench) -> None:
    subject = bench.jetstream.subjects.work_item("nonsense", 1)
    await bench.jetstream.nc.jetstream().publish(subject, b"\xff")
    turn = await bench.post(await bench.session(), "hello")
    async with running(bench.settings):
        assert await bench.ended(turn) == "completed"
        await until(lambda: empty(bench))
    assert await bench.parked() == 1


async def test_a_turn_that_always_breaks_is_ended_and_parked(bench: Bench) -> None:
    settings = msgspec.structs.replace(bench.settings, limits=Limits(turn_attempts=1))
    session = await bench.session("test:breaks")
    turn = await bench.post(session, "hello")

    class Breaks:
        async def answer(self, request: Request) -> Answer:
            return Answer("x", (AskedCall("broken", 7),))  # type: ignore[arg-type]

    async with running(settings, {"test:breaks": Breaks()}):
        assert await bench.ended(turn) == "error"
        await until(lambda: empty(bench))
    assert await bench.parked() == 1


# -- as a process ----------------------------------------------------------------------------


class Marked:
    """Says in a file that it was asked, and answers slowly or at once."""

    def __init__(self, folder: str, delay_s: float) -> None:
        self._folder, self._delay_s = folder, delay_s

    async def answer(self, request: Request) -> Answer:
        if any(message["role"] == "tool" for message in request.messages):
            mark(self._folder, "second")
            await asyncio.sleep(self._delay_s)
            return Answer("done")
        mark(self._folder, "first")
        return Answer("", (AskedCall("mark", "{}"),))

    async def tool(self, args: dict[str, Any], key: str) -> str:
        mark(self._folder, "tool")
        return "marked"


def mark(folder: str, what: str) -> None:
    with open(os.path.join(folder, what), "a") as file:
        file.write("x")


def marks(folder: object, what: str) -> int:
    path = os.path.join(str(folder), what)
    return os.path.getsize(path) if os.path.exists(path) else 0


def serve(config: str, folder: str, delay_s: str) -> None:
    """The process: the worker with a scripted model, stopped as the command line does it."""

    async def until_stopped() -> None:
        model = Marked(folder, float(delay_s))
        settings = msgspec.json.decode(config, type=Settings)
        work = asyncio.ensure_future(
            worker.run(settings, {"test:marked": model}, [Tool("mark", "", {}, model.tool)])
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(until_stopped())


@asynccontextmanager
async def process(
    settings: Settings, folder: object, delay_s: float
) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from tests.integration.test_turns import serve; serve(*sys.argv[1:])",
        json.dumps(msgspec.to_builtins(settings)),
        str(folder),
        str(delay_s),
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_a_killed_workers_turn_goes_on_in_another_after_its_last_step(
    bench: Bench, tmp_path: object
) -> None:
    turn = await bench.post(await bench.session("test:marked"), "hello")
    async with process(bench.settings, tmp_path, 600) as first:
        await until(lambda: marks(tmp_path, "second"), within_s=20)
        first.kill()
        await first.wait()
    async with process(bench.settings, tmp_path, 0):
        assert await bench.ended(turn) == "completed"
    assert (marks(tmp_path, "first"), marks(tmp_path, "tool")) == (1, 1)
    assert marks(tmp_path, "second") == 2


async def test_a_stopped_worker_finishes_what_runs_takes_nothing_new_and_exits_0(
    bench: Bench, tmp_path: object
) -> None:
    session = await bench.session("test:marked")
    turn = await bench.post(session, "hello")
    async with process(bench.settings, tmp_path, 1) as child:
        await until(lambda: marks(tmp_path, "second"), within_s=20)
        child.terminate()
        later = await bench.post(session, "too late")
        assert await child.wait() == 0
    assert await bench.status(turn) == "completed"
    assert await bench.status(later) == "requested"
