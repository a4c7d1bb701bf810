"""Models and tools without reason: they answer, call tools, ask other branches, fail, or take long.

What a model does is drawn in its process, so a second attempt at a turn may go another way, as
with a real one. A message with POISON in it kills whatever process asks a model about it.
"""

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from plait.events.errors import ModelFailure
from plait.events.limits import Limits
from plait.events.types import Usage
from plait.services.turns.models import Answer, AskedCall, ModelError, Request, RetryLater
from plait.services.turns.tools import Tool

if TYPE_CHECKING:
    from tests.simulation.processes import Process

_SESSION = re.compile(r"\bs[a-z2-7]{12}\b")
POISON = "POISON"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


class Actor:
    def __init__(self, process: "Process") -> None:
        self._process = process

    async def answer(self, request: Request) -> Answer:
        process, chance = self._process, self._process.chance
        fate = process.fate("model")
        await process.pause(chance.choice((0.0, 0.02, 0.3, 2.0)))
        if fate in ("kill", "kill_after"):
            process.kill()
        elif fate == "freeze":
            await process.freeze()
        elif fate is not None:
            await process.pause(chance.random() * 20)
        process.check()
        last = next((m for m in reversed(request.messages) if m["role"] == "user"), None)
        if last is not None and POISON in last["content"]:
            process.kill()
            process.check()
        drawn = chance.random()
        if drawn < 0.04:
            raise ModelError("the provider refused it")
        if drawn < 0.05:
            raise RuntimeError("a library broke")
        if drawn < 0.09:
            raise RetryLater("too many", ModelFailure.RATE_LIMITED, chance.choice((None, 0.1, 3.0)))
        said = f"said by {process.name} ({process.world.count('answers')})"
        if drawn < 0.12:
            said = ""
        elif drawn < 0.2:
            said += " at length" * 12
        results = sum(m["role"] == "tool" for m in request.messages[-4:])
        if chance.random() > process.world.plan.talkative / (1 + results):
            return Answer(said, usage=Usage(1, 1))
        place = _SESSION.findall(last["content"])[-1:] if last is not None else []
        session = place[0] if place else None
        calls = [self._call(session) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
        if chance.random() < 0.02:
            calls *= 4
        return Answer(
            said if chance.random() < 0.3 else "", tuple(calls), Usage(1, 1), "tool_calls"
        )

    def _call(self, session: str | None) -> AskedCall:
        chance = self._process.chance
        kind = chance.choices(("send", "tool", "odd"), weights=(6, 3, 1))[0]
        if kind == "tool":
            return AskedCall(chance.choice(("count", "slow", "broken")), '{"x": 1}')
        if kind == "odd":
            return AskedCall(*chance.choice((("nothing", "{}"), ("count", "{"), ("count", "[1]"))))
        world = self._process.world
        args: dict[str, Any] = {
            "target_branch": self._process.world.watch.facts.some_address(
                chance, session, self._process.name
            ),
            "message": f"from {self._process.name} ({world.count('sends')}) in {session}",
            "wait_reply": chance.random() < world.plan.waits,
        }
        if args["wait_reply"] and chance.random() < 0.6:
            args["timeout_s"] = chance.choice((0.001, 0.5, 2, 4, 10, 1000))
        if chance.random() < 0.03:
            args["message"] = "x" * (Limits().text_bytes // 200)
        return AskedCall("send_to_branch", json.dumps(args))


def tools(process: "Process") -> list[Tool]:
    async def count(arguments: dict[str, Any], key: str) -> str:
        process.check()
        process.world.watch.tool_runs(process.name, key)
        fate = process.fate("tool")
        if fate in ("kill", "kill_after"):
            process.kill()
        await process.pause(0.0 if fate is None else process.chance.random() * 8)
        return f"counted {process.world.count('tools')}"

    async def slow(arguments: dict[str, Any], key: str) -> str:
        process.check()
        process.world.watch.tool_runs(process.name, key)
        await process.pause(process.chance.random() * 6)
        return "slow"

    async def broken(arguments: dict[str, Any], key: str) -> str:
        await asyncio.sleep(0)
        raise ValueError("a tool that fails")

    return [
        Tool("count", "counts", SCHEMA, count),
        Tool("slow", "takes its time", SCHEMA, slow),
        Tool("broken", "fails", SCHEMA, broken),
    ]
