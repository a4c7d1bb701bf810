"""Tokens on the event stream: whatever comes in whatever order, what a reader puts together has no
gap and no repeat, ends before the log's event, and is what the log says."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from plait.events import ids
from plait.events.content import Contents
from plait.events.limits import Limits
from plait.events.memory import MemoryBlobs, MemoryKeys
from plait.events.tokens import Tokens
from plait.events.types import (
    AnyEvent,
    Content,
    Epoch,
    ModelAnswered,
    ModelFailed,
    TurnClaimed,
    TurnEnded,
    TurnError,
)
from plait.services.gateway.tokens import CALLS, CLOSED, Cursor, Feed

TENANT = "t"
SESSION = ids.session_id("tokens")
BRANCH = ids.branch_id(SESSION, "b")
TURN = ids.turn_id(BRANCH, "t")
ROOM = 10_000


class Stream:
    """A feed, and one client that reads its stream as the API describes it."""

    def __init__(self, feed: Feed | None = None) -> None:
        self.feed = feed or Feed()
        self.contents = Contents(MemoryKeys(), MemoryBlobs(), Limits())
        self.cursor = Cursor(self.feed, self.contents)
        self.pieces: list[dict[str, Any]] = []
        self.text, self.done = "", False

    def look(self) -> "Stream":
        self.read(self.cursor.fresh())
        return self

    async def log(self, *events: AnyEvent) -> "Stream":
        """The feed sees the log's events before the stream gets them."""
        for event in events:
            self.feed.see(event)
        for event in events:
            self.read(await self.cursor.before(event))
        return self

    def read(self, blocks: bytes) -> None:
        for block in blocks.decode().split("\n\n")[:-1]:
            name, data = block.split("\n")
            assert name == "event: token"
            piece = msgspec.json.decode(data.removeprefix("data: "))
            if piece["restarted"]:
                self.text, self.done = "", False
            assert not self.done, "nothing comes after the end"
            assert piece["offset"] == len(self.text), "no gap and no repeat"
            self.text += piece["text"]
            self.done = piece["done"]
            self.pieces.append(piece)

    async def content(self, text: str) -> Content:
        await self.contents.create_key(TENANT, SESSION)
        return await self.contents.write(text, TENANT, SESSION)

    async def answered(self, text: str, epoch: Epoch = (1, 1), step: int = 1) -> ModelAnswered:
        return ModelAnswered(
            turn_id=TURN, epoch=epoch, step=step, context="", text=await self.content(text)
        )


def piece(
    offset: int,
    text: str,
    end: Any = "",
    *,
    epoch: Epoch = (1, 1),
    step: int = 1,
    turn: str = TURN,
) -> Tokens:
    return Tokens(turn, epoch, step, offset, text, end)


def take(feed: Feed, *pieces: Tokens) -> None:
    for one in pieces:
        feed.take(one, ROOM)


def claimed(epoch: Epoch) -> TurnClaimed:
    return TurnClaimed(turn_id=TURN, epoch=epoch, worker="w", node_id=ids.node_id(BRANCH, TURN))


async def test_pieces_come_as_they_are_said_and_end_before_the_answer() -> None:
    stream = Stream()
    take(stream.feed, piece(0, "one "))
    stream.look()
    take(stream.feed, piece(4, "two "), piece(8, "three"))
    stream.look()
    take(stream.feed, piece(13, "", "whole"))
    stream.look()
    assert [(p["offset"], p["text"], p["done"]) for p in stream.pieces] == [
        (0, "one ", False),
        (4, "two three", False),
        (13, "", True),
    ]
    assert stream.pieces[0]["branch_id"] == BRANCH
    assert stream.pieces[0]["node_id"] == ids.node_id(BRANCH, TURN)
    await stream.log(await stream.answered("one two three"))
    assert len(stream.pieces) == 3


async def test_an_answer_that_overtakes_its_tokens_brings_the_rest_of_them() -> None:
    stream = Stream()
    take(stream.feed, piece(0, "one "))
    await stream.look().log(await stream.answered("one two"))
    assert (stream.text, stream.done, len(stream.pieces)) == ("one two", True, 2)
    take(stream.feed, piece(4, "two", "whole"))
    assert stream.look().pieces[2:] == []
    assert not stream.feed.calls


async def test_of_an_answer_nothing_of_which_was_shown_the_event_alone_is_shown() -> None:
    stream = Stream()
    take(stream.feed, piece(0, "one two", "whole"))
    await stream.log(await stream.answered("one two"))
    take(stream.feed, piece(0, "one two", "whole"))
    assert stream.look().pieces == []


async def test_who_comes_in_the_middle_gets_what_there_is_so_far() -> None:
    early = Stream()
    take(early.feed, piece(0, "one "), piece(4, "two "))
    late = Stream(early.feed)
    for reader in (early, late):
        reader.look()
    assert late.text == "one two "
    take(early.feed, piece(8, "three", "whole"))
    for reader in (early, late):
        reader.look()
    assert late.text == early.text == "one two three"
    assert len(late.pieces) == len(early.pieces) == 2


async def test_the_first_reader_in_the_middle_waits_for_what_it_asked_for() -> None:
    stream = Stream()
    take(stream.feed, piece(4, "two "))
    assert stream.look().pieces == [] and stream.feed.gap.is_set()
    take(stream.feed, piece(0, "one two "), piece(4, "two "), piece(8, "three"))
    assert stream.look().text == "one two three"


async def test_a_take_over_says_that_the_text_begins_anew() -> None:
    stream = Stream()
    take(stream.feed, piece(0, "a long beginning"))
    stream.look()
    take(stream.feed, piece(0, "another", epoch=(1, 2)))
    assert stream.look().text == "a long beginning", "the log has not said so yet"
    await stream.log(claimed((1, 2)))
    assert (stream.text, stream.pieces[-1]["restarted"]) == ("", True)
    take(stream.feed, piece(16, ", from a stale worker"), piece(7, " text", epoch=(1, 2)))
    assert stream.look().pieces[-1]["restarted"] is False
    assert stream.text == "another text"
    await stream.log(await stream.answered("another text", (1, 2)))
    assert stream.done


@pytest.mark.parametrize("told", [True, False], ids=["by its worker", "by the log"])
async def test_a_call_that_failed_is_void_and_the_next_one_begins_anew(told: bool) -> None:
    stream = Stream()
    take(stream.feed, piece(0, "half an ans"))
    stream.look()
    if told:
        take(stream.feed, piece(11, "", "broken"))
        assert stream.look().pieces[-1] == stream.pieces[0] | {
            "text": "",
            "restarted": True,
        }
    error = TurnError("cut_off", "it broke")
    await stream.log(
        ModelFailed(turn_id=TURN, epoch=(1, 1), step=1, nth=1, context="", error=error)
    )
    assert (stream.text, stream.done, len(stream.pieces)) == ("", False, 2)
    await stream.log(claimed((2, 1)))
    take(stream.feed, piece(0, "a whole answer", epoch=(2, 1)))
    assert stream.look().text == "a whole answer"


async def test_a_turn_that_is_cancelled_takes_back_what_its_model_was_saying() -> None:
    stream = Stream()
    take(stream.feed, piece(0, "half"))
    await stream.look().log(TurnEnded(turn_id=TURN, status="cancelled"))
    assert (stream.text, stream.pieces[-1]["done"], len(stream.pieces)) == ("", True, 2)
    take(stream.feed, piece(4, " more"), piece(0, "half more"))
    assert len(stream.look().pieces) == 2 and not stream.feed.calls


async def test_the_next_step_waits_until_the_log_has_closed_the_one_before() -> None:
    stream = Stream()
    take(stream.feed, piece(0, "step one"))
    stream.look()
    take(stream.feed, piece(8, "", "whole"), piece(0, "step two", step=2))
    assert len(stream.look().pieces) == 1
    await stream.log(await stream.answered("step one"))
    assert (stream.text, stream.done) == ("step one", True)
    stream.text, stream.done = "", False  # the next step has a text of its own
    assert stream.look().pieces[-1]["step"] == 2 and stream.text == "step two"


async def test_an_answer_that_is_not_what_was_said_replaces_it() -> None:
    stream = Stream()
    take(stream.feed, piece(0, " padded "))
    await stream.look().log(await stream.answered("padded"))
    assert (stream.text, stream.done, stream.pieces[-1]["restarted"]) == ("padded", True, True)


async def test_what_is_held_is_bounded_and_the_rest_comes_with_the_event() -> None:
    stream, room = Stream(), 10
    room -= stream.feed.take(piece(0, "x" * 8), room)
    room -= stream.feed.take(piece(8, "y" * 8), room)
    assert room == 2
    stream.feed.take(piece(16, "z"), room)
    await stream.look().log(await stream.answered("x" * 8 + "y" * 8 + "z"))
    assert (stream.text, stream.done) == ("x" * 8 + "y" * 8 + "z", True)
    for number in range(CALLS + 10):
        take(stream.feed, piece(0, "x", turn=ids.turn_id(BRANCH, str(number))))
    assert len(stream.feed.calls) == CALLS
    for number in range(CALLS + 10):
        await stream.log(TurnEnded(turn_id=ids.turn_id(BRANCH, str(number)), status="completed"))
    assert not stream.feed.calls and stream.feed.held == 0
    assert CALLS <= CLOSED


async def test_the_account_of_what_is_held_is_even_whatever_happens() -> None:
    """Random pieces and log events, of several readers: each puts together what was said."""
    for seed in range(200):
        chance = random.Random(seed)
        feed, held, step = Feed(), 0, 1
        readers = [Stream(feed)]
        said = "".join(chance.choice("abcdefgh ") for _ in range(chance.randrange(1, 60)))
        epoch, sent = (1, 1), 0
        while sent < len(said) or chance.random() < 0.3:
            match chance.randrange(7):
                case 0 | 1 | 2:
                    start = chance.randrange(sent + 1)
                    stop = min(len(said), sent + chance.randrange(6))
                    held += feed.take(piece(start, said[start:stop], epoch=epoch, step=step), ROOM)
                    sent = max(sent, stop)
                case 3:
                    readers.append(Stream(feed))
                case 4:
                    chance.choice(readers).look()
                case 5:
                    lost = chance.randrange(len(said) + 1)  # somebody else missed some
                    held += feed.take(piece(lost, said[lost:sent], epoch=epoch, step=step), ROOM)
                case _ if chance.random() < 0.3:
                    epoch, sent = (1, epoch[1] + 1), 0
                    event = claimed(epoch)
                    held += feed.see(event)
                    for reader in readers:
                        reader.read(await reader.cursor.before(event))
                        reader.text, reader.done = "", False
            assert held == feed.held, seed
        for reader in readers:
            end = await reader.answered(said, epoch, step)
            held += feed.see(end)
            reader.read(await reader.cursor.before(end))
            assert reader.text in ("", said), seed
        assert held == feed.held == 0, seed
        await asyncio.sleep(0)
