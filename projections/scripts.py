"""How the store is spoken to: several commands and scripts in one round trip, bounded in time.

Scripts run by their digest, and are loaded when the server does not know them. Every script is
safe to run again: a server that restarted may know only some of them.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import NoScriptError

CONNECT_S = 5.0
ANSWER_S = 30.0  # the store answers nothing else while it frees or saves a lot
CONNECTIONS = 64  # of one process; who finds none free waits


class Script:
    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


# A script or a command, its keys, its arguments.
Call = tuple[Script | str, Sequence[str], Sequence[str | int | bytes]]


def connect(url: str) -> Redis:
    """The client that all of this expects: it gives bytes, and has no time-out of its own.

    With one, redis-py sends through `asyncio.wait_for`, which in Python 3.11 now and then swallows
    a cancellation. `evaluate` bounds the time instead.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=ANSWER_S,
        socket_connect_timeout=CONNECT_S,
        socket_timeout=None,
        socket_keepalive=True,
    )
    return Redis.from_pool(pool)


async def evaluate(redis: Redis, *calls: Call) -> list[Any]:
    """The answers, in order. Raises the first error, which does not quote the arguments."""
    try:
        async with asyncio.timeout(ANSWER_S):
            try:
                return await _evaluate(redis, calls)
            except NoScriptError:
                for what in dict.fromkeys(what for what, _, _ in calls):
                    if isinstance(what, Script):
                        await redis.script_load(what.text)
                return await _evaluate(redis, calls)
    except TimeoutError:
        raise exceptions.TimeoutError(f"no answer within {ANSWER_S:g} s") from None


async def _evaluate(redis: Redis, calls: Sequence[Call]) -> list[Any]:
    pipe = redis.pipeline(transaction=False)
    for what, keys, arguments in calls:
        if isinstance(what, Script):
            pipe.evalsha(what.sha, len(keys), *keys, *arguments)
        else:
            pipe.execute_command(what, *keys, *arguments)
    answers = await pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
