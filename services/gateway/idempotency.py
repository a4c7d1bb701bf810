"""What makes a command the same one when it is sent again (P3).

A key becomes one record before the append: the digest of what was asked, and what its addresses
resolved to. A retry resolves nothing anew and derives the same ids. Refusals are not recorded.
"""

import secrets
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from plait.events import ids
from plait.events.errors import IdempotencyMismatch, Invalid
from plait.events.store import Requests

KEY_CHARS = 255

Plan = TypeVar("Plan", bound=Struct)

_encode = msgspec.msgpack.Encoder().encode


class Asked(NamedTuple):
    """One call. `key` None: nobody will send it again, and nothing is recorded."""

    command_id: str
    key: str | None
    digest: bytes


class _Record(Struct, frozen=True):
    digest: bytes
    plan: msgspec.Raw


def asked(tenant: str, key: str | None, method: str, path: str, body: Struct | None) -> Asked:
    """The body counts as it was understood, not byte by byte. Raises Invalid."""
    if key is None:
        return Asked(secrets.token_hex(13), None, b"")
    if not 1 <= len(key) <= KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise Invalid(f"an Idempotency-Key has 1 to {KEY_CHARS} printable ASCII characters")
    digest = blake2b(digest_size=16)
    for part in (method.encode(), path.encode(), _encode(body)):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return Asked(ids.derive("command", tenant, key), key, digest.digest())


async def settled(
    requests: Requests,
    tenant: str,
    call: Asked,
    kind: type[Plan],
    resolve: Callable[[], Awaitable[Plan]],
    check: Callable[[Plan], Awaitable[None]],
) -> Plan:
    """The plan of the first call with this key, or a fresh one that is recorded if `check` does
    not refuse it. Raises IdempotencyMismatch, and what `resolve` and `check` raise."""
    if call.key is None:
        return await resolve()
    standing = await requests.get(tenant, call.key)
    if standing is None:
        plan = await resolve()
        await check(plan)
        record = _Record(call.digest, msgspec.Raw(_encode(plan)))
        standing = await requests.create(tenant, call.key, _encode(record))
    record = msgspec.msgpack.decode(standing, type=_Record)
    if record.digest != call.digest:
        raise IdempotencyMismatch
    return msgspec.msgpack.decode(record.plan, type=kind)
