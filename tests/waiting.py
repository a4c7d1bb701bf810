"""Waiting for conditions, bounded: the tests' only way to wait."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)
