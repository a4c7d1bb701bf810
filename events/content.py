"""Sealing and opening of content, with the session's key; large content in the object store.

The edges seal what came in before a command is decided, and open what a model or a reader needs;
what is between them never sees a text.
"""

import hashlib
import hmac

import msgspec
from msgspec import Struct

from plait.events.errors import Invalid, TextTooLong
from plait.events.limits import Limits
from plait.events.store import Blobs, Keys
from plait.events.types import Content


class Text(Struct, frozen=True, tag="text", tag_field="type"):
    """One part of content. More kinds of part will come; unknown ones are refused."""

    text: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Text, ...]).decode


def keyed_digest(secret: bytes, data: bytes) -> str:
    """HMAC-SHA256, 128 bits of it, hexadecimal."""
    return hmac.digest(secret, data, hashlib.sha256)[:16].hex()


def key_id(secret: bytes) -> str:
    """Names a session's key without giving it away."""
    return keyed_digest(secret, b"key id")


def seal(text: str, key_id: str, secret: bytes) -> Content:
    data = _encode((Text(text),))
    return Content(
        size=len(text.encode()), digest=keyed_digest(secret, data), key=key_id, data=data
    )


def unseal(data: bytes) -> str:
    return "\n".join(part.text for part in _decode(data))


def check_text(text: str, limits: Limits) -> None:
    """Raises TextTooLong, and Invalid for NUL and lone surrogates, which no store keeps."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise Invalid(f"the text holds a lone surrogate at character {error.start}") from None
    if size > limits.text_bytes:
        raise TextTooLong(size, limits.text_bytes)
    if "\0" in text:
        raise Invalid(f"the text holds a NUL at character {text.index(chr(0))}")


class Contents:
    """Seals and opens texts of any session. Keeps a bounded number of keys in memory."""

    def __init__(self, keys: Keys, blobs: Blobs, limits: Limits, *, keys_kept: int = 10_000):
        self._keys, self._blobs, self._limits = keys, blobs, limits
        self._kept: dict[tuple[str, str], tuple[str, bytes]] = {}
        self._keys_kept = keys_kept

    async def create_key(self, tenant: str, session: str) -> None:
        """Before a session's first append."""
        self._keep(tenant, session, await self._keys.create(tenant, session))

    async def write(self, text: str, tenant: str, session: str) -> Content:
        """Raises TextTooLong and Invalid; KeyError when the session's key does not exist."""
        check_text(text, self._limits)
        key = self._kept.get((tenant, session)) or self._keep(
            tenant, session, await self._keys.get(tenant, session)
        )
        content = seal(text, *key)
        if content.data is None or len(content.data) <= self._limits.inline_bytes:
            return content
        name = f"{tenant}.{session}.{content.digest}"
        await self._blobs.put(name, content.data)
        return msgspec.structs.replace(content, data=None, blob=name)

    async def read(self, content: Content) -> str:
        """Raises KeyError when the blob is gone."""
        if content.data is not None:
            return unseal(content.data)
        assert content.blob is not None, "content has its data in itself or in a blob"
        return unseal(await self._blobs.get(content.blob))

    def _keep(self, tenant: str, session: str, key: tuple[str, bytes]) -> tuple[str, bytes]:
        while len(self._kept) >= self._keys_kept:
            del self._kept[next(iter(self._kept))]
        self._kept[tenant, session] = key
        return key
