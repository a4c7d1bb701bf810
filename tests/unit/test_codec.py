"""Bytes in the log: what was written stays readable, and what is unknown is never guessed at."""

from hashlib import sha256
from typing import get_args

import msgspec
import pytest

from plait.events import codec
from plait.events.codec import Codec, WorkItem
from plait.events.errors import AppendTooLarge, UnknownEvent
from plait.events.types import AnyEvent, Append, BranchNamed, BranchOpened, Event, TurnSuspended
from tests.histories import write_v1

# Published: neither the file nor this line ever changes. A new version gets a file of its own.
V1 = "808aee68b707ee6c24e09992776b3f7b0bf9631e50eefea0bb93ec3eae3c2523"


class NamedBefore(Event, frozen=True, tag="BranchNamed.0"):
    """What an event looked like before: two fields became one."""

    branch: str
    first: str
    second: str


def joined(old: NamedBefore) -> BranchNamed:
    return BranchNamed(old.branch, f"{old.first} {old.second}")


def history() -> list[tuple[tuple[str, str, str], bytes]]:
    return msgspec.msgpack.decode(
        write_v1.FILE.read_bytes(), type=list[tuple[tuple[str, str, str], bytes]]
    )


def raw(*events: dict[str, object], **envelope: object) -> bytes:
    return msgspec.msgpack.encode({"command_id": "c", "at": 1, "events": events, **envelope})


def test_the_first_versions_history_is_still_the_published_one() -> None:
    assert sha256(write_v1.FILE.read_bytes()).hexdigest() == V1


def test_the_first_versions_history_decodes_to_what_was_written() -> None:
    appends = [codec.decode(data) for _, data in history()]
    assert [append.events for append in appends] == [tuple(events) for _, events in write_v1.LOG]


def test_the_first_versions_history_encodes_to_the_same_bytes() -> None:
    for _, data in history():
        assert codec.encode(codec.decode(data)) == data


def test_the_first_versions_history_holds_every_event() -> None:
    held = {type(event) for _, data in history() for event in codec.decode(data).events}
    assert held == set(get_args(AnyEvent))


def test_an_event_of_an_older_version_is_read_as_the_present_one() -> None:
    upcasting = Codec({NamedBefore: joined})
    old = NamedBefore("b", "left", "right")
    data = raw({"t": "BranchOpened", "fork": "n"}, msgspec.to_builtins(old), root="r", cause="x")
    assert upcasting.decode(data) == Append(
        "c", 1, (BranchOpened("n"), BranchNamed("b", "left right")), "r", "x"
    )
    with pytest.raises(UnknownEvent, match=r"BranchNamed\.0"):
        codec.decode(data)


def test_what_is_written_today_reads_the_same_with_upcasters() -> None:
    upcasting = Codec({NamedBefore: joined})
    for _, data in history():
        assert upcasting.decode(data) == codec.decode(data)


def test_an_unknown_event_names_its_tag_and_what_to_do() -> None:
    with pytest.raises(UnknownEvent, match=r"'Later\.2'.*upgrade"):
        codec.decode(raw({"t": "BranchOpened", "fork": "n"}, {"t": "Later.2"}))


def test_an_append_of_a_newer_version_is_not_guessed_at() -> None:
    known: dict[str, object] = {"t": "BranchOpened", "fork": "n"}
    for data in (raw(known, v=2), raw({"t": "Later"}, v=2)):
        with pytest.raises(UnknownEvent, match=r"version 2.*upgrade"):
            codec.decode(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"no append", msgspec.msgpack.encode([1]), raw({"t": "BranchOpened"}), raw({})],
)
def test_bytes_that_are_no_append_raise_the_same_error(data: bytes) -> None:
    with pytest.raises(UnknownEvent):
        codec.decode(data)


def test_the_command_is_known_even_where_the_events_are_not() -> None:
    assert codec.command_of(raw({"t": "Later.2"}, v=9)) == "c"
    with pytest.raises(UnknownEvent):
        codec.command_of(b"\xc1")


def test_an_append_that_the_log_could_not_take_is_refused_with_its_size() -> None:
    with pytest.raises(AppendTooLarge, match="1044480"):
        codec.encode(Append("c", 1, (BranchOpened("x" * codec.APPEND_BYTES),)))


def test_headers_tell_command_events_and_cause() -> None:
    append = Append("c", 1, (BranchOpened("n"), TurnSuspended("t", (1, 1))), cause="t")
    assert codec.headers(append) == {
        "Plait-Command": "c",
        "Plait-Events": "BranchOpened,TurnSuspended",
        "Plait-Cause": "t",
    }


def test_a_work_item_is_read_back() -> None:
    item = WorkItem("acme", "t", 3)
    assert codec.decode_item(codec.encode_item(item)) == item
