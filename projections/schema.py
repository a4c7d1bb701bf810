"""The read models' keys, fields and values, and their version: nowhere else.

    <prefix>:<version>:{control}:live        the generation that readers read
    <prefix>:<version>:{control}:building    the one that is being built beside it
    <prefix>:<version>:{control}:<generation>:all      position of the partition: the whole log
    <prefix>:<version>.<generation>:{<tenant>:<session>}:<Key>   a session, in one slot
    <prefix>:<version>.<generation>:{<tenant>}:<Key>             the list of a tenant's sessions

A session's keys are hashes of many small fields, so that each event is written blindly, without
reading what was there. Fields and values name a node of the session without its session.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, NamedTuple

from msgspec import Struct

from plait.events.types import Content

Role = Literal["root", "user", "assistant", "tool", "attach"]

VERSION = 1  # raise it when keys, fields or rows change: a new generation is built by itself


class Generation(NamedTuple):
    """One building of the read models, from one log."""

    log: int
    token: str

    def __str__(self) -> str:
        return f"{self.log}-{self.token}"

    @classmethod
    def parse(cls, found: bytes | str) -> "Generation":
        text = found.decode() if isinstance(found, bytes) else found
        log, _, token = text.partition("-")
        return cls(int(log), token)


class Key(StrEnum):
    META = "meta"  # position, SESSION, HEAD, NODES
    NODES = "nodes"  # node → NodeRow
    PLACES = "places"  # a node that had waited in the inbox → PlaceRow
    RESULTS = "results"  # tool node, or refused message → ResultRow
    TEXTS = "texts"  # node, message or wait → Content; see args_of and late_of
    BRANCHES = "branches"  # <branch>:<BranchField>
    TURNS = "turns"  # <turn>:<TurnField>, and <turn>:<step> → StepRow
    ENDS = "ends"  # turn → EndRow
    MESSAGES = "messages"  # <message>:<MessageField>, and a call → the message that it sent
    SESSIONS = "sessions"  # of a tenant: session by the sequence that created it


# fields of META
POSITION = "position"
SESSION = "session"  # SessionRow
HEAD = "head"  # HeadRow
NODES = "nodes"  # count


class BranchField(StrEnum):
    OPENED = "opened"  # OpenedRow
    HEAD = "head"  # node
    NAME = "name"  # text, or None
    ARCHIVED = "archived"  # bool
    TURN = "turn"  # the one that makes it busy, or None
    NODES = "nodes"  # count


class TurnField(StrEnum):
    STATE = "state"  # requested, running or suspended
    ASKED = "asked"  # the message that first asked for it
    NODE = "node"  # its assistant node
    LAST = "last"  # its last step
    FAILED = "failed"  # how many of its model calls gave no answer


class MessageField(StrEnum):
    SENT = "sent"  # SentRow; this and the outcomes are in the sender's session
    OUTCOME = "outcome"  # OutcomeRow
    LATE = "late"  # OutcomeRow
    DELIVERED = "delivered"  # Mark; this and those below are in the target's session
    CONSUMED = "consumed"  # Mark
    REFUSED = "refused"  # RefusedRow


class Row(Struct, frozen=True, array_like=True):
    """A value, as a MessagePack array: a changed row needs a new VERSION."""


class SessionRow(Row, frozen=True):
    title: Content | None
    model: str | None
    attended: bool
    at: int


class HeadRow(Row, frozen=True):
    """`fork`: HEAD is a reservation, the branch has not opened."""

    branch: str
    fork: str | None


class NodeRow(Row, frozen=True):
    """`seq` None: it waits in the inbox, or has its PlaceRow. `nth` orders what one event placed.
    The caller of a tool node is its turn's assistant node."""

    role: Role
    at: int
    seq: int | None = None
    nth: int = 0
    predecessor: str | None = None
    turn: str | None = None
    name: str | None = None
    source: str | None = None
    from_node: str | None = None
    sender: str | None = None


class PlaceRow(Row, frozen=True):
    seq: int
    nth: int
    predecessor: str


class ResultRow(Row, frozen=True):
    """`note` stands in where there is no content."""

    status: str
    note: str | None = None


class OpenedRow(Row, frozen=True):
    fork: str
    seq: int


class StepRow(Row, frozen=True):
    context: str
    finish: str
    calls: tuple[str, ...]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    text: Content | None


class FailureRow(Row, frozen=True):
    """A model call without an answer; `deadline` until when the turn paused, if it asked again."""

    step: int
    context: str
    code: str
    message: str
    deadline: int | None


class EndRow(Row, frozen=True):
    status: str
    code: str | None = None
    message: str | None = None


class SentRow(Row, frozen=True):
    target: str
    from_node: str
    deadline: int | None
    at: int
    seq: int


class Mark(Row, frozen=True):
    at: int
    seq: int


class RefusedRow(Row, frozen=True):
    at: int
    seq: int
    reason: str


class OutcomeRow(Row, frozen=True):
    """`text` is the field of TEXTS that holds the content, if there is any."""

    outcome: str
    at: int
    seq: int
    node: str | None
    reason: str | None
    text: str | None


def short(session: str, any_id: str) -> str:
    """How a session's keys name what is its own; ids of other sessions stay whole."""
    return any_id[len(session) + 1 :] if any_id.startswith(session + "-") else any_id


def whole(session: str, name: str) -> str:
    """The id again: ids of sessions begin with s, the rest of one with b or _."""
    return name if name.startswith("s") else f"{session}-{name}"


def field(name: str, what: str | int) -> str:
    return name + ":" + (what if isinstance(what, str) else str(what))


def failure_of(turn: str, nth: int) -> str:
    return f"{turn}:{TurnField.FAILED}:{nth}"


def args_of(node: str) -> str:
    return f"{node}:args"


def late_of(message: str) -> str:
    return f"{message}:late"


class Names(NamedTuple):
    """Whole key names under one prefix."""

    prefix: str

    @property
    def live(self) -> str:
        return f"{self.prefix}:{VERSION}:{{control}}:live"

    @property
    def building(self) -> str:
        return f"{self.prefix}:{VERSION}:{{control}}:building"

    def position(self, generation: Generation) -> str:
        return f"{self.prefix}:{VERSION}:{{control}}:{generation}:all"

    def of(
        self, generation: Generation, tenant: str, session: str, keys: Iterable[Key]
    ) -> list[str]:
        """Keys of a session, or without a session those of the tenant's list."""
        owner = f"{tenant}:{session}" if session else tenant
        slot = f"{self.prefix}:{VERSION}.{generation}:{{{owner}}}:"
        return [slot + key for key in keys]

    def version_of(self, name: str) -> int | None:
        """The schema version of any key of ours."""
        head = name.removeprefix(self.prefix + ":").partition(":")[0].partition(".")[0]
        return int(head) if head.isascii() and head.isdigit() else None

    def generation_of(self, name: str) -> str | None:
        """The generation that a key belongs to; None for the pointers."""
        head, _, rest = name.removeprefix(self.prefix + ":").partition(":")
        if "." in head:
            return head.partition(".")[2]
        return rest.split(":")[1] if rest.endswith(":all") else None
