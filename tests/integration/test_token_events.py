"""Tokens on the event stream of a whole Plait, with a model that says what the test tells it to."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from llmock.pytest_plugin import LLMock

from plait.events.errors import ModelFailure
from plait.events.settings import Settings
from plait.services.dev.stack import Stack
from plait.services.turns.models import Answer, AskedCall, ModelError, Request
from tests.conftest import Address, Prefixes
from tests.integration.gateway import Event, Held, Plait, running
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Speaking:
    """Says each piece that the test puts into the queue of the session's first message."""

    def __init__(self) -> None:
        self.scripts: dict[str, asyncio.Queue[str | Answer | Exception]] = {}

    def script(self, name: str) -> "asyncio.Queue[str | Answer | Exception]":
        return self.scripts.setdefault(name, asyncio.Queue())

    async def answer(self, request: Request) -> Answer:
        script = self.script(request.messages[0]["content"])
        while True:
            said = await script.get()
            if isinstance(said, Exception):
                raise said
            if isinstance(said, Answer):
                return said
            request.said(said)


MODEL = Speaking()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plait(
    nats_server: Address, valkey_server: Address, prefixes: Prefixes
) -> AsyncIterator[Plait]:
    settings = Settings(
        nats_url=nats_server.url,
        nats_monitor_url=nats_server.monitor_url,
        redis_url=valkey_server.url,
        prefix=prefixes.next(),
    )
    # The gateway checks the names of models; what it does not know is the default's here.
    async with running(settings, {"test:held": MODEL}) as plait:
        yield plait


class Reader:
    """A client: keeps what it was sent, and the text of each step as the API describes it."""

    def __init__(self, plait: Plait, session: str, **query: str) -> None:
        self.seen: list[Event] = []
        self.texts: dict[int, str] = {}
        self.done: set[int] = set()
        self._events = plait.events(session, **query)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._events:
            self.seen.append(event)
            if event.type == "token":
                self._take(event.data)
            if event.type == "TurnEnded":
                break
        await self._events.aclose()

    def _take(self, piece: dict[str, Any]) -> None:
        step = piece["step"]
        if piece["restarted"]:
            self.texts[step] = ""
            self.done.discard(step)
        held = self.texts.get(step, "")
        assert step not in self.done
        assert piece["offset"] == len(held), "no gap and no repeat"
        self.texts[step] = held + piece["text"]
        if piece["done"]:
            self.done.add(step)

    @property
    def types(self) -> list[str]:
        """The kinds of events, repeats of `token` once."""
        kinds = [event.type for event in self.seen]
        pairs = zip(["", *kinds], kinds, strict=False)
        return [kind for before, kind in pairs if (before, kind) != ("token", "token")]

    async def has(self, step: int, text: str) -> None:
        def there() -> bool:
            if self.task.done():
                self.task.result()
            return self.texts.get(step) == text

        await until(there)

    async def end(self) -> None:
        async with asyncio.timeout(20):
            await self.task


async def test_tokens_come_while_they_are_said_and_end_before_the_answer(plait: Plait) -> None:
    session = await plait.session()
    posted = await plait.say(session, "streams", run=True)
    script, reader = MODEL.script("streams"), Reader(plait, session, **{"from": "start"})
    said = ""
    for word in ("Once ", "upon ", "a ", "time “äöü” 🌊"):
        script.put_nowait(word)
        said += word
        await reader.has(1, said)
    assert (await plait.get(f"/v1/turns/{posted['turn_id']}"))["status"] == "running"
    assert not reader.done
    script.put_nowait(Answer(said))
    await reader.end()
    assert reader.texts == {1: said} and reader.done == {1}
    assert reader.types[-3:] == ["token", "ModelAnswered", "TurnEnded"]
    token = next(event for event in reader.seen if event.type == "token")
    turn = await plait.get(f"/v1/turns/{posted['turn_id']}", wait=10)
    assert token.id == ""
    assert {name: token.data[name] for name in ("turn_id", "branch_id", "node_id")} == {
        "turn_id": posted["turn_id"],
        "branch_id": posted["branch_id"],
        "node_id": turn["node_id"],
    }
    assert turn["text"] == said


async def test_who_connects_in_the_middle_gets_what_there_is_so_far_and_all_that_follows(
    plait: Plait,
) -> None:
    session = await plait.session()
    await plait.say(session, "middle", run=True)
    script = MODEL.script("middle")
    first = "x" * 200_000 + " "
    script.put_nowait(first)  # nobody watches: nothing is heard before the first reader asks
    await until(script.empty)
    readers = [Reader(plait, session)]
    await readers[0].has(1, first)
    script.put_nowait("and ")
    readers += [Reader(plait, session) for _ in range(3)]
    for reader in readers:
        await reader.has(1, first + "and ")
    script.put_nowait("more")
    script.put_nowait(Answer(first + "and more"))
    for reader in readers:
        await reader.end()
        assert reader.texts == {1: first + "and more"} and reader.done == {1}
        assert reader.types[-3:] == ["token", "ModelAnswered", "TurnEnded"]


async def test_each_step_has_a_text_of_its_own(plait: Plait) -> None:
    session = await plait.session()
    await plait.say(session, "steps", run=True)
    script, reader = MODEL.script("steps"), Reader(plait, session)
    call = AskedCall("no_such_tool", "{}")
    for said in ("I look.", Answer("I look.", (call,)), "Nothing.", Answer("Nothing.")):
        script.put_nowait(said)
    await reader.end()
    assert reader.texts == {1: "I look.", 2: "Nothing."} or reader.texts == {}
    tokens = [event.data["step"] for event in reader.seen if event.type == "token"]
    assert tokens == sorted(tokens)
    answers = [place for place, e in enumerate(reader.seen) if e.type == "ModelAnswered"]
    for place, event in enumerate(reader.seen):
        if event.type == "token":
            assert place < answers[event.data["step"] - 1]


async def test_what_a_call_that_failed_had_said_is_taken_back(plait: Plait) -> None:
    session = await plait.session()
    await plait.say(session, "fails", run=True)
    script, reader = MODEL.script("fails"), Reader(plait, session)
    script.put_nowait("half an ans")
    await reader.has(1, "half an ans")
    script.put_nowait(ModelError("it broke", ModelFailure.MODEL_ERROR))
    await reader.end()
    assert reader.texts == {1: ""}
    assert reader.types[-3:] == ["token", "ModelFailed", "TurnEnded"]


async def test_a_cancelled_turn_ends_its_tokens(plait: Plait) -> None:
    session = await plait.session()
    posted = await plait.say(session, "cancelled", run=True)
    script, reader = MODEL.script("cancelled"), Reader(plait, session)
    script.put_nowait("half an ans")
    await reader.has(1, "half an ans")
    await plait.post(f"/v1/turns/{posted['turn_id']}/cancel")
    await reader.end()
    assert reader.texts == {1: ""}
    script.put_nowait(Answer(""))


async def test_nobody_hears_what_is_said_in_another_session(plait: Plait) -> None:
    mine, other = await plait.session(), await plait.session()
    reader = Reader(plait, mine)
    for session, name in ((other, "other's"), (mine, "mine")):
        await plait.say(session, name, run=True)
        MODEL.script(name).put_nowait(name)
    await reader.has(1, "mine")
    for name in ("other's", "mine"):
        MODEL.script(name).put_nowait(Answer(name))
    await reader.end()
    assert {e.data["branch_id"].split("-")[0] for e in reader.seen if e.type == "token"} == {mine}


async def test_a_killed_workers_text_is_taken_back_and_the_next_one_says_it_anew(
    tmp_path: Path, llmock: LLMock
) -> None:
    llmock.tool_mode("off").pace(20)
    text = " ".join(f"word{number}" for number in range(30))
    llmock.reply(text, times=2)
    async with Stack(tmp_path / "data", model="openai:m") as stack:
        plait = Plait(Settings(port=int(stack.url.rpartition(":")[2])), Held())
        session = await plait.session()
        await plait.say(session, "go on", run=True)
        reader = Reader(plait, session)
        await until(lambda: len(reader.texts.get(1, "")) > 30)
        await stack.kill("turns")
        await reader.end()
        await plait.http.aclose()
    assert reader.texts == {1: text} and reader.done == {1}
    restarted = [e.data["offset"] for e in reader.seen if e.type == "token" and e.data["restarted"]]
    assert restarted == [0]
    assert reader.types[-3:] == ["token", "ModelAnswered", "TurnEnded"]
