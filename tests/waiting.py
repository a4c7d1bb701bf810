"""Waiting for conditions, bounded: the tests' only way to wait."""

import asyncio
from collections.abc import Callable
from inspect import isawaitable


async def until(condition: Callable[[], object], *, within_s: float = 20.0) -> None:
    """Until the condition (or what it returns to await) is true. Fails past the bound."""
    async with asyncio.timeout(within_s):
        while True:
            value = condition()
            if isawaitable(value):
                value = await value
            if value:
                return
            await asyncio.sleep(0.005)
