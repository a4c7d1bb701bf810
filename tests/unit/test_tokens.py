"""Tokens beside the log: what is published, and that a reader can come at any time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from nats.aio.client import Client

from plait.events import ids, tokens
from plait.events.subjects import Subjects
from plait.events.tokens import PIECE_CHARS, Tokens
from plait.services.turns.tokens import TokenStreams
from tests.waiting import until

SESSION = ids.session_id("tokens")
BRANCH = ids.branch_id(SESSION, "b")
TURN = ids.turn_id(BRANCH, "t")
SUBJECTS = Subjects("p")


class Wire:
    """As much of a NATS client as this needs."""

    def __init__(self) -> None:
        self.published: list[tuple[str, Tokens]] = []
        self.asked: Any = None

    async def subscribe(self, subject: str, cb: Any) -> None:
        assert subject == "p.tokens-asked.>"
        self.asked = cb

    async def publish(self, subject: str, data: bytes) -> None:
        self.published.append((subject, tokens.decode(data)))

    async def ask(self, reply: str) -> None:
        class Asked:
            subject = SUBJECTS.tokens_asked("t", SESSION)

        Asked.reply = reply  # type: ignore[attr-defined]
        await self.asked(Asked)


class Reader:
    """Takes pieces as the protocol says."""

    def __init__(self) -> None:
        self.held, self.gap, self.end = "", False, ""

    def take(self, piece: Tokens) -> None:
        if piece.offset > len(self.held):
            self.gap = True
            return
        self.held += piece.text[len(self.held) - piece.offset :]
        self.end = piece.end or self.end


@asynccontextmanager
async def streams() -> AsyncIterator[tuple[TokenStreams, Wire]]:
    wire = Wire()
    made = TokenStreams(cast(Client, wire), SUBJECTS)
    task = asyncio.create_task(made.run())
    await until(lambda: wire.asked)
    try:
        yield made, wire
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pieces_are_gathered_in_order_and_the_last_says_how_it_ended() -> None:
    async with streams() as (made, wire):
        speech = made.speak("t", TURN, (1, 1), 2)
        for word in ("one ", "two ", "three"):
            speech.say(word)
        speech.end("whole")
        speech.end("broken")
        await until(lambda: wire.published)
    token = ids.token_of(BRANCH)
    assert wire.published == [
        (f"p.tokens.t.{SESSION}.{token}", Tokens(TURN, (1, 1), 2, 0, "one two three", "whole"))
    ]
    assert SUBJECTS.tokens("t", SESSION) == f"p.tokens.t.{SESSION}.*"


async def test_a_reader_in_the_middle_asks_and_has_what_there_is_so_far() -> None:
    async with streams() as (made, wire):
        speech = made.speak("t", TURN, (1, 1), 1)
        speech.say("ä" * PIECE_CHARS + "b")
        await until(lambda: len(wire.published) == 2)
        late = Reader()
        speech.say("cd")
        await until(lambda: len(wire.published) == 3)
        late.take(wire.published[-1][1])
        assert late.gap and not late.held
        await wire.ask("inbox")
        answered = [piece for subject, piece in wire.published if subject == "inbox"]
        for piece in answered:
            late.take(piece)
        assert late.held == "ä" * PIECE_CHARS + "bcd" and not late.end
        speech.say("e")
        speech.end("broken")
        await until(lambda: wire.published[-1][1].end)
        late.take(wire.published[-1][1])
        assert (late.held[-4:], late.end) == ("bcde", "broken")
        before = len(wire.published)
        await wire.ask("inbox")
        assert len(wire.published) == before, "nothing is said any more: the log has it"
