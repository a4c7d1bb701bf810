"""A process of turns whose model and tool ask the test what to say, and wait until it says it.

python -m tests.chaos.scripted_worker      settings come from PLAIT_… variables, as for
                                           `plait turns`; CHAOS_SOCKET is where the test listens
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec import Struct

from plait.events.context import without_header
from plait.events.settings import Settings
from plait.services.cli.logs import log_to_stderr
from plait.services.turns import worker
from plait.services.turns.models import Answer, AskedCall, Request
from plait.services.turns.tools import Tool

SOCKET = "CHAOS_SOCKET"
MODEL = "chaos:script"
LINE_BYTES = 16 * 1024 * 1024


class Question(Struct, frozen=True):
    """What a worker was asked to do. `said` is the last user message of a model's context, or
    the argument of a tool; `key` is the tool's idempotency key."""

    kind: str  # model or tool
    pid: int
    said: str
    key: str = ""
    messages: list[dict[str, Any]] = []


class Reply(Struct, frozen=True):
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments, as JSON text


class Script:
    """Nothing is kept here: what was asked is written down where no `kill -9` of ours reaches."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def answer(self, request: Request) -> Answer:
        messages = [dict(message) for message in request.messages]
        users = [m["content"] for m in messages if m["role"] == "user"]
        said = without_header(users[-1]) if users else ""
        reply = await self._ask(Question("model", os.getpid(), said, messages=messages))
        return Answer(
            text=reply.text,
            calls=tuple(AskedCall(name, args) for name, args in reply.calls),
            finish="tool_calls" if reply.calls else "stop",
        )

    async def work(self, args: dict[str, Any], key: str) -> str:
        return (await self._ask(Question("tool", os.getpid(), str(args["what"]), key))).text

    async def _ask(self, question: Question) -> Reply:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=LINE_BYTES)
        try:
            writer.write(msgspec.json.encode(question) + b"\n")
            line = await reader.readline()
            return msgspec.json.decode(line, type=Reply)
        finally:
            writer.close()


async def _run(settings: Settings) -> None:
    script = Script(Path(os.environ[SOCKET]))
    schema = {
        "type": "object",
        "properties": {"what": {"type": "string"}},
        "required": ["what"],
    }
    work = Tool("work", "Does what the test says.", schema, script.work)
    await worker.run(settings, {MODEL: script}, [work])


if __name__ == "__main__":
    settings = Settings.from_env()
    log_to_stderr(settings.log_level, process="scripted-worker")
    uvloop.run(_run(settings))
