"""Between an append and the bytes in the log: MessagePack maps, versions, upcasters.

Bytes that this version does not know are never skipped or guessed at: they raise UnknownEvent.
"""

from collections.abc import Callable, Mapping
from typing import Any, Union, get_args

import msgspec
from msgspec import Struct

from plait.events.errors import AppendTooLarge, UnknownEvent
from plait.events.types import AnyEvent, Append, Event

VERSION = 1  # of the envelope
APPEND_BYTES = 1024 * 1024 - 4096  # NATS takes messages of 1 MiB by default, headers included
HEADER_EVENTS = 16  # event types named in a header: each reader of the log has to parse it

# An event class that is no longer written → the present one. A new version of `Name` has the tag
# "Name.2"; the class that was `Name` until then is kept here and keeps its tag.
UPCASTERS: Mapping[type[Event], Callable[[Any], AnyEvent]] = {}


class WorkItem(Struct, frozen=True):
    """Which turn to look at, never what to do: the worker decides from the log (P5)."""

    tenant: str
    turn_id: str
    n: int


class Codec:
    """Encodes what is written today; decodes everything that was ever written."""

    def __init__(self, upcasters: Mapping[type[Event], Callable[[Any], AnyEvent]]) -> None:
        self._upcasters = dict(upcasters)
        known = (*get_args(AnyEvent), *self._upcasters)
        self._tags = {cls.__struct_config__.tag for cls in known}
        self._decode: Callable[[bytes], Any]
        if self._upcasters:
            stored = msgspec.defstruct(
                "StoredAppend",
                [
                    (f.encode_name, tuple[Union[known], ...] if f.name == "events" else f.type)  # type: ignore[valid-type]  # noqa: UP007
                    if f.required
                    else (f.encode_name, f.type, f.default)
                    for f in msgspec.structs.fields(Append)
                ],
            )
            self._decode = msgspec.msgpack.Decoder(stored).decode
        else:
            self._decode = msgspec.msgpack.Decoder(Append).decode

    def encode(self, append: Append) -> bytes:
        """Raises AppendTooLarge."""
        data = _encode(append)
        if len(data) > APPEND_BYTES:
            raise AppendTooLarge(len(data), APPEND_BYTES)
        return data

    def decode(self, data: bytes) -> Append:
        """Raises UnknownEvent, naming what this version does not know."""
        try:
            append = self._decode(data)
        except msgspec.DecodeError as error:
            raise self._unknown(data, error) from None
        if append.v > VERSION:
            raise _newer(append.v)
        if not self._upcasters:
            return append  # type: ignore[no-any-return]
        present = {name: getattr(append, name) for name in Append.__struct_fields__}
        return Append(**{**present, "events": tuple(map(self._upcast, append.events))})

    def _upcast(self, event: Event) -> AnyEvent:
        upcast = self._upcasters.get(type(event))
        return upcast(event) if upcast else event  # type: ignore[return-value]

    def _unknown(self, data: bytes, error: msgspec.DecodeError) -> UnknownEvent:
        try:
            outline = _outline(data)
        except msgspec.DecodeError:
            return UnknownEvent(f"the log holds bytes that are no append: {error}")
        if outline.v > VERSION:
            return _newer(outline.v)
        for event in outline.events:
            if event.t not in self._tags:
                return UnknownEvent(
                    f"the log holds an event {event.t!r} (command {outline.command_id}) that this "
                    "version does not know: upgrade this process"
                )
        return UnknownEvent(
            f"an event of command {outline.command_id} does not have its known shape ({error}): "
            "upgrade this process"
        )


def _newer(version: int) -> UnknownEvent:
    return UnknownEvent(
        f"the log holds an append of version {version}, and this process reads up to {VERSION}: "
        "upgrade it"
    )


class _Tagged(Struct):
    t: str = ""


class _Outline(Struct):
    """What can be said of an append whose events are not known."""

    command_id: str
    v: int = 1
    events: tuple[_Tagged, ...] = ()


class _Command(Struct):
    command_id: str


_encode = msgspec.msgpack.Encoder().encode
_item = msgspec.msgpack.Decoder(WorkItem).decode
_outline = msgspec.msgpack.Decoder(_Outline).decode
_command = msgspec.msgpack.Decoder(_Command).decode

_default = Codec(UPCASTERS)
encode = _default.encode
decode = _default.decode


def command_of(data: bytes) -> str:
    """The command id alone, also of an append whose events this version does not know."""
    try:
        return _command(data).command_id
    except msgspec.DecodeError as error:
        raise UnknownEvent(f"the log holds bytes that are no append: {error}") from None


def headers(append: Append) -> dict[str, str]:
    """For people and tools that watch the log: nothing of ours reads them."""
    types = ",".join([event.__class__.__name__ for event in append.events[:HEADER_EVENTS]])
    named = {"Plait-Command": append.command_id, "Plait-Events": types}
    if append.cause:
        named["Plait-Cause"] = append.cause
    return named


def encode_item(item: WorkItem) -> bytes:
    return _encode(item)


def decode_item(data: bytes) -> WorkItem:
    """Raises msgspec.DecodeError."""
    return _item(data)
