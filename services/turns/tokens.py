"""Publishes what models say while they say it (see `events.tokens`), for all turns of a process.

Pieces are gathered for a moment, so that a fast model costs thirty messages a second, not a
thousand. Nothing here may hold up or fail a turn: what cannot be sent is dropped, and readers ask.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from plait.events import ids, tokens
from plait.events.subjects import Subjects
from plait.events.tokens import PIECE_CHARS, Tokens
from plait.events.types import Epoch

GATHER_S = 0.03

log = structlog.get_logger("turns")


class Speech(Protocol):
    """One model call, as it is heard."""

    def say(self, text: str) -> None: ...

    def end(self, how: Literal["whole", "broken"]) -> None: ...


# Of a tenant's turn, epoch and step.
Speak = Callable[[str, str, Epoch, int], Speech]


class TokenStreams:
    """`speak` begins a call; `run` publishes until cancelled."""

    def __init__(self, nc: Client, subjects: Subjects) -> None:
        self._nc, self._subjects = nc, subjects
        self._open: dict[str, dict[_Speech, None]] = {}  # by the subject of who asks
        self._dirty: dict[_Speech, None] = {}
        self._wake = asyncio.Event()

    def speak(self, tenant: str, turn_id: str, epoch: Epoch, step: int) -> Speech:
        branch = ids.branch_of(turn_id)
        speech = _Speech(
            self,
            self._subjects.tokens(tenant, branch),
            self._subjects.tokens_asked(tenant, ids.session_of(branch)),
            (turn_id, epoch, step),
        )
        self._open.setdefault(speech.asked, {})[speech] = None
        return speech

    async def run(self) -> None:
        await self._nc.subscribe(self._subjects.all_tokens_asked, cb=self._answer)
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            dirty, self._dirty = self._dirty, {}
            for speech in dirty:
                await self._publish(speech.subject, speech.unsent())

    def heard(self, speech: "_Speech") -> None:
        self._dirty[speech] = None
        self._wake.set()

    def ended(self, speech: "_Speech") -> None:
        speeches = self._open[speech.asked]
        del speeches[speech]
        if not speeches:
            del self._open[speech.asked]
        self.heard(speech)

    async def _answer(self, asked: Msg) -> None:
        if asked.reply:
            for speech in list(self._open.get(asked.subject, ())):
                await self._publish(asked.reply, speech.so_far())

    async def _publish(self, subject: str, pieces: list[Tokens]) -> None:
        try:
            for piece in pieces:
                await self._nc.publish(subject, tokens.encode(piece))
        except Exception as error:  # noqa: BLE001 - not connected, or too much is waiting to go out
            log.debug("tokens dropped", error=repr(error))


class _Speech:
    def __init__(
        self, streams: TokenStreams, subject: str, asked: str, call: tuple[str, Epoch, int]
    ) -> None:
        self.subject, self.asked = subject, asked
        self._streams, self._call = streams, call
        self._sent: list[str] = []
        self._new: list[str] = []
        self._offset = 0
        self._end: Literal["", "whole", "broken"] = ""

    def say(self, text: str) -> None:
        self._new.append(text)
        self._streams.heard(self)

    def end(self, how: Literal["whole", "broken"]) -> None:
        if not self._end:
            self._end = how
            self._streams.ended(self)

    def unsent(self) -> list[Tokens]:
        text = "".join(self._new)
        self._new.clear()
        pieces = self._pieces(text, self._offset, self._end)
        self._offset += len(text)
        self._sent.append(text)
        return pieces

    def so_far(self) -> list[Tokens]:
        """What has been published: what has not comes anyway."""
        return self._pieces("".join(self._sent), 0, "")

    def _pieces(self, text: str, offset: int, end: Literal["", "whole", "broken"]) -> list[Tokens]:
        starts = range(0, max(len(text), 1), PIECE_CHARS)
        return [
            Tokens(
                *self._call,
                offset=offset + start,
                text=text[start : start + PIECE_CHARS],
                end=end if start == starts[-1] else "",
            )
            for start in starts
        ]
