"""A command over HTTP, acknowledged when it is durable, beside what no API of this kind can skip:
the HTTP stack itself and one durable publish."""

import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from plait.services.dev.child import Child
from plait.services.dev.servers import free_port
from tests.bench.baseline import RawPublisher, one_by_one
from tests.bench.client import Connection
from tests.bench.report import Bar, Figure, Rounds, ms
from tests.bench.stack import gateway_alone, until_listening, whole_stack

ROUNDS = 15
CALLS = 30  # of each kind, in one round
WARM_UP = 100
BODY = {"text": "x" * 200, "run": False}


class _Session(msgspec.Struct):
    session_id: str


async def http(data: Path) -> AsyncIterator[Figure]:
    """With the bar: the gateway, NATS and Valkey. Beside it for information: with the services
    that follow the log on the same cores, which slow down the call and not its baseline."""
    port = free_port()
    server = await Child.start([sys.executable, "-m", "tests.bench.noop", str(port)])
    try:
        await until_listening(port)
        async with Connection(f"http://127.0.0.1:{port}") as noop:
            async with gateway_alone(data / "alone") as (url, key, raw), Connection(url, key) as on:
                yield await _compared(on, noop, raw, "gateway alone", Bar("≤", 2.0))
            async with (
                whole_stack(data / "whole") as (stack, raw),
                Connection(stack.url, stack.key) as on,
            ):
                yield await _compared(on, noop, raw, "all services on these cores", None)
    finally:
        await server.stop()


async def _compared(
    plait: Connection, noop: Connection, raw: RawPublisher, beside: str, bar: Bar | None
) -> Figure:
    path = await _new_session(plait)
    for _ in range(WARM_UP):
        await _call_s(noop, "/")
        await raw.once_s()
        await _call_s(plait, path)
    rounds, bare, publish = Rounds(), list[float](), list[float]()
    for _ in range(ROUNDS):
        path = await _new_session(plait)  # what no turn has read is bounded
        bare.append(median(await one_by_one(CALLS, partial(_call_s, noop, "/"))))
        publish.append(median(await one_by_one(CALLS, raw.once_s)))
        posted = median(await one_by_one(CALLS, partial(_call_s, plait, path)))
        rounds.add(posted, bare[-1] + publish[-1])
    return Figure(
        group="http",
        what=f"POST a message, p50, vs no-op POST + raw publish; {beside}",
        measured=ms(rounds.medians[0]),
        baseline=f"{ms(median(bare))} + {ms(median(publish))}",
        value=rounds.ratio,
        bar=bar,
    )


async def _new_session(plait: Connection) -> str:
    made = msgspec.json.decode(await plait.post("/v1/sessions", {}), type=_Session)
    return f"/v1/sessions/{made.session_id}/messages"


async def _call_s(connection: Connection, path: str) -> float:
    began = time.perf_counter()
    await connection.post(path, BODY)
    return time.perf_counter() - began
