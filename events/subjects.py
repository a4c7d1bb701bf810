"""Streams, subjects and durable names: nowhere else.

Subjects are for ever. The two slot tokens let readers share the log by tenant and by session:
`<prefix>.event.<tenant slot>.<session slot>.<tenant>.<session>.<branch>`.
"""

from hashlib import blake2b
from typing import NamedTuple

from plait.events.ids import branch_of, derive, token_of
from plait.events.store import StreamId

TENANT_SLOTS = 64
SESSION_SLOTS = 256
GENERATION = "plait.generation"  # where the log stream's metadata keeps it


def slot(text: str, slots: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % slots


def stream_of(tenant: str, branch: str) -> StreamId:
    """The stream of a branch id (or of any id that belongs to the branch)."""
    whole = branch_of(branch)
    return StreamId(tenant, whole.partition("-")[0], token_of(whole))


class Subjects(NamedTuple):
    """All names under one prefix; several Plaits may share a NATS with different ones."""

    prefix: str = "plait"

    # streams and buckets
    @property
    def log(self) -> str:
        return f"{self.prefix}-log"

    @property
    def work(self) -> str:
        return f"{self.prefix}-work"

    @property
    def requests(self) -> str:
        return f"{self.prefix}-requests"

    @property
    def parked(self) -> str:
        return f"{self.prefix}-parked"

    @property
    def leases(self) -> str:
        return f"{self.prefix}-leases"

    @property
    def keys(self) -> str:
        return f"{self.prefix}-keys"

    @property
    def providers(self) -> str:
        return f"{self.prefix}-providers"

    @property
    def blobs(self) -> str:
        return f"{self.prefix}-blobs"

    # the durable of the turn workers
    @property
    def turns_durable(self) -> str:
        return f"{self.prefix}-turns"

    # subjects
    def event(self, stream: StreamId) -> str:
        tenant, session, branch = stream
        return (
            f"{self.prefix}.event.{slot(tenant, TENANT_SLOTS)}.{slot(session, SESSION_SLOTS)}"
            f".{tenant}.{session}.{branch}"
        )

    def events(self, tenant: str | None = None, session: str | None = None) -> str:
        """The filter for everything, for a tenant, or for a session."""
        if tenant is None:
            return f"{self.prefix}.event.>"
        if session is None:
            return f"{self.prefix}.event.{slot(tenant, TENANT_SLOTS)}.*.{tenant}.>"
        return self.event(StreamId(tenant, session, "*"))

    def parse_event(self, subject: str) -> StreamId:
        tenant, session, branch = subject.rsplit(".", 3)[1:]
        return StreamId(tenant, session, branch)

    def work_item(self, turn_id: str, n: int) -> str:
        return f"{self.prefix}.work.{turn_id}.{n}"

    @property
    def work_items(self) -> str:
        return f"{self.prefix}.work.>"

    def request(self, tenant: str, key: str) -> str:
        return f"{self.prefix}.request.{tenant}.{derive('request', tenant, key)}"

    @property
    def all_requests(self) -> str:
        return f"{self.prefix}.request.>"

    # what models say while they say it: core NATS, see `tokens.py`
    def tokens(self, tenant: str, branch: str) -> str:
        """A branch's; with a session's id, the filter for all of the session."""
        session, _, token = branch.partition("-")
        return f"{self.prefix}.tokens.{tenant}.{session}.{token or '*'}"

    def tokens_asked(self, tenant: str, session: str) -> str:
        return f"{self.prefix}.tokens-asked.{tenant}.{session}"

    @property
    def all_tokens_asked(self) -> str:
        return f"{self.prefix}.tokens-asked.>"

    # leases, keys and providers have the names of key-value buckets: NATS's own tools show them
    def lease(self, name: str) -> str:
        return f"$KV.{self.leases}.{name}"

    def key(self, tenant: str, session: str) -> str:
        return f"$KV.{self.keys}.{tenant}.{session}"

    def provider(self, tenant: str, name: str) -> str:
        """With `*` as name, the filter for all of the tenant."""
        return f"$KV.{self.providers}.{tenant}.{name}"

    def blob_part(self, name: str, part: int) -> str:
        return f"{self.prefix}.blob.{name}.{part}"

    @property
    def all_blobs(self) -> str:
        return f"{self.prefix}.blob.>"

    def parked_item(self, kind: str, token: str) -> str:
        return f"{self.prefix}.parked.{kind}.{token}"

    @property
    def all_parked(self) -> str:
        return f"{self.prefix}.parked.>"
