"""What models say while they say it, for the event streams (the protocol: `events.tokens`).

A session has one subscription while somebody watches it, and a call's text is held once; each
stream remembers how much of it went out. So nothing is queued for a slow reader: its pieces are
larger. The log has the last word: what a call said ends with its event, before it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import structlog
from msgspec import Struct
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from plait.events import ids, tokens
from plait.events.content import Contents
from plait.events.store import Recorded
from plait.events.subjects import Subjects
from plait.events.tokens import Tokens
from plait.events.types import (
    AnyEvent,
    Epoch,
    ModelAnswered,
    ModelFailed,
    TurnClaimed,
    TurnEnded,
)

CALLS = 256  # of one session that are heard at once; of more, only the log is shown
HELD_CHARS = 32 * 1024 * 1024  # of all calls in this process; from there on, only the log is shown
CLOSED = 256  # turns of a session whose late pieces are recognised
ASK_S = 0.25  # from one question for what was missed to the next
PENDING = 1_024  # messages of one session that may wait here
PENDING_BYTES = 8 * 1024 * 1024

log = structlog.get_logger("gateway")

CallKey = tuple[Epoch, int]  # of a turn's calls: the epoch and the step
_LAST: CallKey = ((2**63, 2**63), 2**63)


class Piece(Struct, frozen=True):
    """The `data:` of `event: token`. A reader's text of this step is what it had up to `offset`
    (characters), and `text`; `done`: no more comes. `restarted`: what it had is void, also if it
    was `done`: the model is asked again, or the turn is over."""

    turn_id: str
    branch_id: str
    node_id: str
    step: int
    offset: int
    text: str
    done: bool
    restarted: bool


class Spoken:
    """One model call, as far as it was heard. `end`: "", "whole", "broken", or "full": no more is
    held, and readers get the rest with the log's event."""

    def __init__(self, turn_id: str, key: CallKey) -> None:
        self.turn_id, self.key = turn_id, key
        self.text, self.end = "", ""


class Feed:
    """The calls of one session that the log has not closed yet, by turn."""

    def __init__(self) -> None:
        self.calls: dict[str, Spoken] = {}
        self.readers: dict[object, Callable[[], None]] = {}
        self.gap = asyncio.Event()
        self._closed = _Closed()

    def take(self, piece: Tokens, room: int) -> int:
        """By how many characters the held text has grown: at most `room`."""
        turn, key = piece.turn_id, (piece.epoch, piece.step)
        call = self.calls.get(turn)
        if self._closed.covers(turn, key) or (call is not None and key < call.key):
            return 0
        grown = 0
        if call is None or call.key < key:
            if piece.end == "broken" or (call is None and len(self.calls) >= CALLS):
                return 0
            grown -= self._drop(call)
            call = self.calls[turn] = Spoken(turn, key)
        if piece.end == "broken":
            call.end = "broken"
            grown -= self._drop(call)
        elif call.end:
            return grown
        elif piece.offset > len(call.text):
            self.gap.set()
            return grown
        else:
            new = piece.text[len(call.text) - piece.offset :]
            if len(new) > room:
                call.end = "full"
                return grown
            call.text += new
            call.end = piece.end
            grown += len(new)
        for wake in self.readers.values():
            wake()
        return grown

    def see(self, event: AnyEvent) -> int:
        """What the log says about a call is the end of it here. By how much the text has grown."""
        closing = _closing(event)
        if closing is None:
            return 0
        turn, key = closing
        self._closed.add(turn, key)
        call = self.calls.get(turn)
        return -self._drop(call) if call is not None and call.key <= key else 0

    @property
    def held(self) -> int:
        return sum(len(call.text) for call in self.calls.values())

    def _drop(self, call: Spoken | None) -> int:
        if call is None or self.calls.pop(call.turn_id, None) is None:
            return 0
        return len(call.text)


class Feeds:
    """Of all sessions that somebody watches."""

    def __init__(self, nc: Client, subjects: Subjects) -> None:
        self._nc, self._subjects = nc, subjects
        self._feeds: dict[tuple[str, str], tuple[Feed, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._held = 0

    def join(self, tenant: str, session: str, reader: object, wake: Callable[[], None]) -> Feed:
        """`wake` is called when something new was heard. `leave` it."""
        name = (tenant, session)
        if name not in self._feeds:
            feed = Feed()
            self._feeds[name] = (feed, asyncio.create_task(self._hear(feed, tenant, session)))
        feed, _ = self._feeds[name]
        feed.readers[reader] = wake
        return feed

    def leave(self, tenant: str, session: str, reader: object) -> None:
        feed, task = self._feeds[tenant, session]
        del feed.readers[reader]
        if not feed.readers:
            del self._feeds[tenant, session]
            self._held -= feed.held
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def see(self, recorded: Recorded) -> None:
        """Everything that the tail hands out, before the streams get it."""
        stream = recorded.stream
        found = self._feeds.get((stream.tenant, stream.session))
        if found is not None:
            for event in recorded.append.events:
                self._held += found[0].see(event)

    async def _hear(self, feed: Feed, tenant: str, session: str) -> None:
        """Until cancelled. Asks for what was said before it listened, and for what it missed."""

        async def take(message: Msg) -> None:
            try:
                piece = tokens.decode(message.data)
            except msgspec.DecodeError:
                return  # of a newer version
            if feed.readers:
                self._held += feed.take(piece, HELD_CHARS - self._held)

        nc, inbox = self._nc, self._nc.new_inbox()
        asked = self._subjects.tokens_asked(tenant, session)
        heard: list[Subscription] = []

        async def hear(subject: str) -> None:
            heard.append(
                await nc.subscribe(
                    subject,
                    cb=take,
                    pending_msgs_limit=PENDING,
                    pending_bytes_limit=PENDING_BYTES,
                )
            )

        try:
            await hear(self._subjects.tokens(tenant, session))
            await hear(inbox)
            while True:
                await nc.publish(asked, b"", reply=inbox)
                await asyncio.sleep(ASK_S)
                await feed.gap.wait()
                feed.gap.clear()
        except nats_errors.Error as error:
            # Not connected for long: the log is shown all the same, and so is the next session.
            log.warning("the tokens of a session are not heard", why=repr(error))
        finally:
            for subscription in heard:
                if not nc.is_closed:
                    await subscription.unsubscribe()


class Cursor:
    """What one event stream was sent of the calls that are under way."""

    def __init__(self, feed: Feed, contents: Contents) -> None:
        self._feed, self._contents = feed, contents
        self._sent: dict[str, _Sent] = {}
        self._closed = _Closed()

    def fresh(self) -> bytes:
        """The events for what was heard since the last call."""
        broken = [sent for sent in self._sent.values() if sent.call.end == "broken"]
        blocks = [self._void(sent) for sent in broken]
        for turn, call in self._feed.calls.items():
            sent = self._sent.get(turn) or _Sent(call)
            # Of the turn's next call nothing is shown before the log has closed the one before.
            if sent.call is not call or self._closed.covers(turn, call.key) or not call.text:
                continue
            self._sent[turn] = sent
            done = call.end == "whole"
            if len(call.text) > sent.chars or done != sent.done:
                blocks.append(_block(call, sent.chars, call.text[sent.chars :], done))
                sent.chars, sent.done = len(call.text), done
        return b"".join(blocks)

    async def before(self, event: AnyEvent) -> bytes:
        """The events that must come before the log's event: the rest of what it closes."""
        closing = _closing(event)
        if closing is None:
            return b""
        turn, key = closing
        self._closed.add(turn, key)
        sent = self._sent.get(turn)
        if sent is None or sent.call.key > key:
            return b""
        if not isinstance(event, ModelAnswered) or sent.call.key != key:
            return self._void(sent, over=isinstance(event, TurnEnded))
        try:
            whole = await self._contents.read(event.text) if event.text else ""
        except KeyError:
            return self._void(sent, over=True)  # erased
        del self._sent[turn]
        said = sent.call.text[: sent.chars]
        if not whole.startswith(said):
            return _block(sent.call, 0, whole, True, restarted=True)
        if sent.done and len(whole) == len(said):
            return b""
        return _block(sent.call, len(said), whole[len(said) :], True)

    def _void(self, sent: "_Sent", *, over: bool = False) -> bytes:
        """The step is asked again, or its turn is over."""
        del self._sent[sent.call.turn_id]
        return _block(sent.call, 0, "", over, restarted=True)


class _Sent:
    def __init__(self, call: Spoken) -> None:
        self.call, self.chars, self.done = call, 0, False


class _Closed:
    """How far the log has closed the calls of turns; of the last ones, which are the ones whose
    pieces may come late."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, CallKey] = OrderedDict()

    def add(self, turn: str, key: CallKey) -> None:
        self._keys[turn] = max(key, self._keys.pop(turn, key))
        while len(self._keys) > CLOSED:
            self._keys.popitem(last=False)

    def covers(self, turn: str, key: CallKey) -> bool:
        return turn in self._keys and key <= self._keys[turn]


def _closing(event: AnyEvent) -> tuple[str, CallKey] | None:
    """The turn, and the last of its calls that are over with this event."""
    match event:
        case ModelAnswered() | ModelFailed():
            return event.turn_id, (event.epoch, event.step)
        case TurnClaimed():
            return event.turn_id, (event.epoch, 0)  # those of older epochs
        case TurnEnded():
            return event.turn_id, _LAST
        case _:
            return None


def _block(call: Spoken, offset: int, text: str, done: bool, *, restarted: bool = False) -> bytes:
    branch = ids.branch_of(call.turn_id)
    piece = Piece(
        turn_id=call.turn_id,
        branch_id=branch,
        node_id=ids.node_id(branch, call.turn_id),
        step=call.key[1],
        offset=offset,
        text=text,
        done=done,
        restarted=restarted,
    )
    return b"event: token\ndata: " + msgspec.json.encode(piece) + b"\n\n"
