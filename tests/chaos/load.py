"""Clients that post, ask and send at random, and keep what they were told."""

import asyncio
import contextlib
import json
import random
from typing import Any

from msgspec import Struct, field

from plait.events import ids
from plait.events.context import without_header
from tests.chaos.director import asks, tells, works
from tests.chaos.scripted_worker import Question, Reply
from tests.chaos.system import Client

BRANCHES = 8
CLIENTS = 4
CALLS = 6  # of one answer
THINK_S = 0.3  # a model's longest thought
PAUSE_S = 0.3  # a client's longest


class Told(Struct):
    """What clients were told: it must be so, once."""

    posts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by text
    sends: dict[str, str] = field(default_factory=dict)  # text → message id
    reads: int = 0


class Load:
    """`actor` is what the models of its branches do."""

    def __init__(self, client: Client, session: str, seed: int) -> None:
        self._client, self._session, self._seed = client, session, seed
        self._chance = random.Random(f"{seed} models")
        self.told = Told()
        self.names = [f"b{number}" for number in range(BRANCHES)]
        self.branches: dict[str, str] = {}
        self.runs: list[Question] = []  # of the tool

    async def prepare(self) -> None:
        for name in self.names:
            self.branches[name] = await self._client.branch(self._session, name)

    async def actor(self, question: Question) -> Reply:
        """Thinks for a moment; asks, tells and works as often as the message says, then ends."""
        if question.kind == "tool":
            self.runs.append(question)
        await asyncio.sleep(self._chance.random() * THINK_S)
        if question.kind == "tool":
            return Reply(f"worked on {question.said}")
        last = question.messages[-1]
        if last["role"] == "tool":
            return Reply(f"so: {last['content']}")
        orders: list[tuple[str, str, str]] = []
        for message in reversed(question.messages):
            if message["role"] != "user":
                break
            with contextlib.suppress(ValueError):
                orders += json.loads(without_header(message["content"]))["orders"]
        if not orders:
            return Reply(f"heard {question.said[:100]}")
        calls = [
            works(text) if verb == "work" else {"ask": asks, "tell": tells}[verb](target, text)
            for verb, target, text in orders[:CALLS]
        ]
        return Reply("", tuple(calls))

    async def run(self, going: asyncio.Event) -> None:
        """Until it is to stop; raises what a client was told and should not have been."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._act(number, going))

    async def _act(self, number: int, going: asyncio.Event) -> None:
        chance = random.Random(f"{self._seed} client {number}")
        done = 0
        while going.is_set():
            done += 1
            text = f"client{number}.{done}"
            branch = chance.choice(self.names)
            drawn = chance.random()
            if drawn < 0.35:
                await self._post(text, branch, run=False)
            elif drawn < 0.8:
                orders = [self._order(chance, branch, f"{text}.{n}") for n in range(2)]
                said = json.dumps({"id": text, "orders": orders[: chance.choice((1, 2))]})
                await self._post(said, branch, run=True)
            else:
                await self._send(text, branch, chance)
            if chance.random() < 0.3:
                await self._read(chance)
            await asyncio.sleep(chance.random() * PAUSE_S)

    def _order(self, chance: random.Random, branch: str, text: str) -> tuple[str, str, str]:
        verb = chance.choices(("ask", "tell", "work"), (5, 2, 3))[0]
        return verb, chance.choice([name for name in self.names if name != branch]), text

    async def _post(self, text: str, branch: str, *, run: bool) -> None:
        self.told.posts[text] = await self._client.say(self._session, text, branch=branch, run=run)

    async def _send(self, text: str, branch: str, chance: random.Random) -> None:
        body: dict[str, object] = {
            "from": branch,
            "target_branch": chance.choice([name for name in self.names if name != branch]),
            "message": text,
        }
        if chance.random() < 0.6:
            # Some of these expire while what should answer them is being killed.
            body |= {"wait_reply": True, "timeout_s": chance.choice((0.5, 3.0, 120.0))}
        sent = await self._client.post(f"/v1/sessions/{self._session}/send", body)
        self.told.sends[text] = sent["message_id"]

    async def _read(self, chance: random.Random) -> None:
        """A read sees the write before it, whatever was killed in between."""
        if not self.told.posts:
            return
        text, posted = chance.choice(list(self.told.posts.items()))
        path = f"/v1/sessions/{self._session}/nodes/{posted['node_id']}"
        node = await self._client.get(path, min_position=posted["position"])
        assert node["text"] == text
        assert node["branch_id"] == ids.branch_of(posted["node_id"])
        self.told.reads += 1
