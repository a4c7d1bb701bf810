"""The test's end of the scripted workers: what they asked, and what they are told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tests.chaos.scripted_worker import LINE_BYTES, Question, Reply
from tests.waiting import until


class Asked:
    """One question of a worker, which waits for its answer."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self.question.pid

    def answer(self, text: str = "", *calls: tuple[str, str]) -> None:
        self.reply.set_result(Reply(text, calls))

    def results(self) -> list[str]:
        """What the model saw as results of its calls, of all turns of its branch."""
        return [m["content"] for m in self.question.messages if m["role"] == "tool"]


Actor = Callable[[Question], Awaitable[Reply]]


class Director:
    """Questions are counted when they arrive, so a killed worker's are counted, too. Without an
    actor each waits until the test answers it."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.actor: Actor | None = None

    def of(self, kind: str, said: str) -> list[Asked]:
        return [a for a in self.asked if a.question.kind == kind and said in a.question.said]

    async def model(self, said: str, nth: int = 1) -> Asked:
        """The nth call of a model whose last user message has these words."""
        return await self._asked("model", said, nth)

    async def tool(self, said: str, nth: int = 1) -> Asked:
        return await self._asked("tool", said, nth)

    async def _asked(self, kind: str, said: str, nth: int) -> Asked:
        await until(lambda: len(self.of(kind, said)) >= nth, within_s=30)
        return self.of(kind, said)[nth - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if not line:
                return
            asked = Asked(msgspec.json.decode(line, type=Question))
            self.asked.append(asked)
            if self.actor is not None:
                reply = await self.actor(asked.question)
            else:
                reply = await asked.reply
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()
        except ConnectionError:
            pass  # The worker was killed meanwhile.
        finally:
            writer.close()


@asynccontextmanager
async def directing(socket: Path) -> AsyncIterator[Director]:
    director = Director()
    serving: set[asyncio.Task[None]] = set()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(director._serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_unix_server(serve, socket, limit=LINE_BYTES)
    try:
        yield director
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def asks(target: str, message: str, timeout_s: float | None = None) -> tuple[str, str]:
    """A call that asks another branch and waits."""
    args: dict[str, object] = {"target_branch": target, "message": message, "wait_reply": True}
    if timeout_s is not None:
        args["timeout_s"] = timeout_s
    return "send_to_branch", json.dumps(args)


def tells(target: str, message: str) -> tuple[str, str]:
    return "send_to_branch", json.dumps({"target_branch": target, "message": message})


def works(what: str) -> tuple[str, str]:
    return "work", json.dumps({"what": what})
