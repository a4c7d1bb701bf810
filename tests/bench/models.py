"""Models behind HTTP: what the client costs, against a provider that costs nothing.

python -m tests.bench.models      is that provider: it says its address and answers until stdin ends
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import uvloop

from plait.events.limits import Limits
from plait.services.dev.child import Child
from plait.services.turns.models import Request
from plait.services.turns.providers import Provider, http_models
from tests.bench.baseline import many
from tests.bench.driver import Driver, driver
from tests.bench.report import Figure, Rounds, ms, rate
from tests.bench.stack import ECHO, servers_and_replies

WORDS = 20  # of an answer, one event each
CALLS = 50  # one after another, in one round
ROUNDS = 7

BRANCHES = 32
TURNS = 4  # on each branch, one after another
TEXT = "What did the other branch find out about this, and does it change the plan?"


async def models(data: Path) -> AsyncIterator[Figure]:
    async with provider() as url:
        for name in ("openai", "anthropic"):
            yield await _call(url, name)
        yield await _turns(data, url)


async def _call(url: str, name: str) -> Figure:
    """Processor time of this process, and not of the provider."""

    async def settings(tenant: str, provider: str) -> Provider:
        return Provider(url, "none")

    model = http_models(Limits(), settings)[f"{name}:"]
    request = Request(f"{name}:bench", ({"role": "user", "content": TEXT},))
    path, body = f"{url}/{name}", msgspec.json.encode({"model": "bench", "stream": True})

    async def plain() -> None:
        async with http.stream("POST", path, content=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    msgspec.json.decode(line[6:])

    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await model.answer(request)
        await plain()
        rounds = Rounds()
        for _ in range(ROUNDS):
            began = time.process_time()
            for _ in range(CALLS):
                answer = await model.answer(request)
            middle = time.process_time()
            for _ in range(CALLS):
                await plain()
            rounds.add((middle - began) / CALLS, (time.process_time() - middle) / CALLS)
        assert len(answer.text.split()) == WORDS
    await model.close()
    measured, baseline = rounds.medians
    return Figure(
        group="models",
        what=f"processor time of one streamed call, {name}, {WORDS} tokens; ratio: to bare httpx",
        measured=ms(measured),
        baseline=ms(baseline),
        value=rounds.ratio,
    )


async def _turns(data: Path, url: str) -> Figure:
    async with contextlib.AsyncExitStack() as stack:
        settings, env = await stack.enter_async_context(servers_and_replies(data))
        plait = await stack.enter_async_context(driver(settings))
        command = [sys.executable, "-m", "plait.services.cli.main", "turns"]
        child = await Child.start(command, env={**env, "OPENAI_BASE_URL": url})
        stack.push_async_callback(child.stop)
        behind_http, echo = await plait.session("openai:bench"), await plait.session(ECHO)
        rounds = Rounds()
        for session in (behind_http, echo):
            await _crowd_s(plait, session, turns=1)
        for _ in range(3):
            rounds.add(await _crowd_s(plait, behind_http), await _crowd_s(plait, echo))
    measured, baseline = rounds.medians
    count = BRANCHES * TURNS
    return Figure(
        group="models",
        what=f"turns on one worker, {BRANCHES} branches, model behind HTTP; ratio: time to {ECHO}",
        measured=rate(count / measured),
        baseline=rate(count / baseline),
        value=rounds.ratio,
    )


async def _crowd_s(plait: Driver, session: str, turns: int = TURNS) -> float:
    branches = [plait.new_branch(session) for _ in range(BRANCHES)]

    async def converse(job: int) -> None:
        for _ in range(turns):
            await plait.completed(await plait.post(branches[job], TEXT))

    began = time.perf_counter()
    await many(BRANCHES, converse, range(BRANCHES))
    return time.perf_counter() - began


# -- the provider ----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def provider() -> AsyncIterator[str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.bench.models",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdin is not None
    try:
        yield (await child.stdout.readline()).decode().strip()
    finally:
        child.stdin.close()
        await child.wait()


def _events(name: str) -> list[object]:
    said = [f"word{number} " for number in range(WORDS)]
    if name == "openai":
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
        choices = [{"index": 0, "delta": {"content": text}} for text in said]
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 20, "completion_tokens": WORDS, "total_tokens": 20 + WORDS}
        return [
            *({**head, "choices": [choice]} for choice in [*choices, end]),
            {**head, "choices": [], "usage": usage},
        ]
    message: dict[str, object] = {
        "id": "1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "bench",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 20, "output_tokens": 1},
    }
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": text},
            }
            for text in said
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": WORDS},
        },
        {"type": "message_stop"},
    ]


def _response(name: str) -> bytes:
    """Each event in a chunk of its own, as it comes from a model."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunks = []
    for event in _events(name):
        kind = f"event: {event['type']}\n" if name == "anthropic" else ""  # type: ignore[index]
        block = kind.encode() + b"data: " + msgspec.json.encode(event) + b"\n\n"
        chunks.append(b"%x\r\n%b\r\n" % (len(block), block))
    return head + b"".join(chunks) + b"0\r\n\r\n"


async def serve() -> None:
    openai, anthropic = _response("openai"), _response("anthropic")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(size)
                path = head.partition(b"\r\n")[0]
                writer.write(anthropic if b"messages" in path or b"anthropic" in path else openai)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve())
