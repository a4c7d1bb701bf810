"""The contract of the log: append with an expected version, read a branch, follow everything.

`memory.py` and `jetstream.py` implement it and pass one suite, `tests/contract/test_store.py`.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

from plait.events.errors import BadPosition
from plait.events.types import Append


class StreamId(NamedTuple):
    """One subject of the log. `branch` is the branch token; `_` is the session's own subject."""

    tenant: str
    session: str
    branch: str


class Position(NamedTuple):
    """A place in the log, `generation.sequence.index`; sorts in the log's order.

    `generation` changes when a log is restored or made anew, so that positions of another log
    are recognised. `event` is the place inside the append.
    """

    generation: int
    sequence: int
    event: int = 0

    def __str__(self) -> str:
        return f"{self.generation}.{self.sequence}.{self.event}"

    @property
    def seq(self) -> int:
        """One integer that sorts like the position: what a node carries as `seq`."""
        return seq_of(self.sequence, self.event)

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Raises BadPosition."""
        parts = text.split(".")
        if len(parts) == 3 and all(part.isascii() and part.isdigit() for part in parts):
            generation, sequence, event = map(int, parts)
            if sequence < 2**43 and event < 1024:
                return cls(generation, sequence, event)
        raise BadPosition(text, "a position has the form generation.sequence.index")


def seq_of(sequence: int, index: int) -> int:
    return sequence << 10 | index


class Recorded(NamedTuple):
    """One append as it stands in the log."""

    stream: StreamId
    sequence: int
    append: Append


class Batch(NamedTuple):
    """Appends in the log's order. Everything of the filter up to sequence `up_to` has been seen
    once this batch has; `up_to` may be past the last append, and `recorded` may be empty (P23)."""

    recorded: Sequence[Recorded]
    up_to: int


class EventStore(Protocol):
    @property
    def generation(self) -> int: ...

    async def append(self, stream: StreamId, append: Append, expected: int) -> int:
        """Writes one append if `expected` is the sequence of the stream's last (0: none yet).

        Returns its sequence once it is durable. A retry of the same `command_id` directly after
        a lost answer returns the sequence of the first. Raises VersionConflict when somebody else
        appended, Unavailable when the log does not answer within the store's time-out.
        """
        ...

    async def read(self, stream: StreamId, after: int = 0) -> Sequence[Recorded]:
        """All appends of one stream with a sequence above `after`, up to the leader's last one:
        what was acknowledged before the call is in it."""
        ...

    async def read_at(self, sequence: int) -> Recorded | None:
        """The append at a sequence."""
        ...

    async def branches(self, tenant: str, session: str) -> Sequence[str]:
        """The branch ids that have opened in a session, in no particular order."""
        ...

    async def last_sequence(self) -> int:
        """The sequence of the log's last append, from the leader (0: empty)."""
        ...

    def follow(
        self, after: int = 0, *, tenant: str | None = None, session: str | None = None
    ) -> AsyncGenerator[Batch, None]:
        """All appends above sequence `after`, then new ones as they come, without end.

        In the log's order, without gap or repeat. When nothing is left it yields an empty batch
        whose `up_to` is the log's end as seen before it asked, and so again as the log grows
        elsewhere. Closing it (`aclosing`) frees what it holds. `session` needs `tenant`.
        """
        ...

    async def close(self) -> None: ...


class Blobs(Protocol):
    """Large content, written before the append that names it (P24)."""

    async def put(self, name: str, data: bytes) -> None: ...

    async def get(self, name: str) -> bytes:
        """Raises KeyError."""
        ...


class Keys(Protocol):
    """One secret per session. Destroying it makes the session's digests and texts useless."""

    async def create(self, tenant: str, session: str) -> tuple[str, bytes]:
        """Key id and secret; the ones that stand when the session has them already."""
        ...

    async def get(self, tenant: str, session: str) -> tuple[str, bytes]:
        """Raises KeyError."""
        ...


class Requests(Protocol):
    """Idempotency records (P3): kept 24 hours."""

    async def get(self, tenant: str, key: str) -> bytes | None: ...

    async def create(self, tenant: str, key: str, record: bytes) -> bytes:
        """Writes the record if there is none; returns the one that stands."""
        ...


class ProviderRecords(Protocol):
    """The sealed settings of a tenant's providers, by name. The last write stands."""

    async def names(self, tenant: str) -> Sequence[str]:
        """In no particular order."""
        ...

    async def get(self, tenant: str, name: str) -> bytes | None: ...

    async def put(self, tenant: str, name: str, record: bytes) -> None: ...

    async def remove(self, tenant: str, name: str) -> None:
        """Leaves nothing of it; it may be gone already."""
        ...


class Leases(Protocol):
    """Who acts on which partition. Correctness never rests on them."""

    async def hold(self, name: str, holder: str) -> bool:
        """Takes or renews; False while another holds it. Lapses by itself after a few seconds."""
        ...

    async def release(self, name: str, holder: str) -> None: ...


class WorkQueue(Protocol):
    """Turns that may run (P5): one item per subject `<turn>.<n>`."""

    async def offer(self, tenant: str, turn_id: str, n: int) -> None:
        """Puts the item on the queue; nothing happens while it is queued or in flight."""
        ...
