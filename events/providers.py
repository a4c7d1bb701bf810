"""The providers of models that a tenant has of its own: where they are, and with which key.

Keys and headers are sealed under PLAIT_SECRET before they are stored. They are in no event, no
answer and no log line; only the worker that calls the provider opens them.
"""

import re
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from plait.events.errors import BudgetExceeded, Invalid, UnknownProvider
from plait.events.model_names import OFFLINE, PROVIDERS
from plait.events.store import ProviderRecords
from plait.events.vault import Vault

Kind = Literal["openai", "anthropic"]  # the wire format that it speaks

PROVIDERS_MAX = 64  # of one tenant
KEY_CHARS = 4096
HEADERS_MAX = 32
HEADER_CHARS = 4096
URL_CHARS = 2048
STALL_MAX_S = 600.0

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?")
_RESERVED = frozenset(name.partition(":")[0] for name in OFFLINE)
# Those would change what the request is, not who sends it.
_NOT_TO_SET = frozenset(
    {"host", "content-length", "content-type", "transfer-encoding", "connection"}
)


class ProviderSettings(Struct, frozen=True, kw_only=True):
    """`base_url` None: the provider's own. `stall_s` None: the limit for all."""

    name: str
    kind: Kind
    base_url: str | None = None
    key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    stall_s: float | None = None

    def __repr__(self) -> str:
        return f"ProviderSettings({self.name!r})"  # The rest may end up in a log line.


class ProviderView(Struct, frozen=True, kw_only=True):
    """What anybody may see of a provider."""

    name: str
    kind: Kind
    base_url: str | None
    key_set: bool
    headers: tuple[str, ...]
    stall_s: float | None


class _Record(Struct, frozen=True, omit_defaults=True):
    kind: Kind
    base_url: str | None = None
    key: bytes | None = None
    header_names: tuple[str, ...] = ()
    headers: bytes | None = None
    stall_s: float | None = None


_encode = msgspec.msgpack.Encoder().encode
_record = msgspec.msgpack.Decoder(_Record).decode
_headers = msgspec.msgpack.Decoder(tuple[tuple[str, str], ...]).decode


class TenantProviders:
    def __init__(self, records: ProviderRecords, vault: Vault) -> None:
        self._records, self._vault = records, vault

    async def names(self, tenant: str) -> Sequence[str]:
        """Of the tenant's own, sorted."""
        return sorted(await self._records.names(tenant))

    async def views(self, tenant: str) -> list[ProviderView]:
        found: list[ProviderView] = []
        for name in await self.names(tenant):
            data = await self._records.get(tenant, name)
            if data is not None:
                found.append(_view(name, _record(data)))
        return found

    async def put(self, tenant: str, settings: ProviderSettings) -> ProviderView:
        """Replaces the whole of it. Raises Invalid, BudgetExceeded and NoSecret."""
        check(settings)
        name = settings.name
        standing = await self._records.names(tenant)
        if name not in standing and len(standing) >= PROVIDERS_MAX:
            raise BudgetExceeded("providers of this tenant", len(standing), PROVIDERS_MAX)
        where = (tenant, name, settings.base_url)
        key, headers = settings.key, settings.headers
        record = _Record(
            kind=settings.kind,
            base_url=settings.base_url,
            key=self._seal(key.encode(), *where, "key") if key else None,
            header_names=tuple(header for header, _ in headers),
            headers=self._seal(_encode(headers), *where, "headers") if headers else None,
            stall_s=settings.stall_s,
        )
        await self._records.put(tenant, name, _encode(record))
        return _view(name, record)

    async def remove(self, tenant: str, name: str) -> None:
        """Raises UnknownProvider."""
        if not _NAME.fullmatch(name) or await self._records.get(tenant, name) is None:
            raise UnknownProvider(name, tuple(await self.names(tenant)))
        await self._records.remove(tenant, name)

    async def get(self, tenant: str, name: str) -> ProviderSettings | None:
        """With everything opened. Raises NoSecret and WrongSecret."""
        if not _NAME.fullmatch(name):
            return None
        data = await self._records.get(tenant, name)
        if data is None:
            return None
        record = _record(data)
        where = (tenant, name, record.base_url)
        key, headers = record.key, record.headers
        return ProviderSettings(
            name=name,
            kind=record.kind,
            base_url=record.base_url,
            key=self._open(key, *where, "key").decode() if key else None,
            headers=_headers(self._open(headers, *where, "headers")) if headers else (),
            stall_s=record.stall_s,
        )

    # What is sealed opens only for its tenant, name and address: whoever can write to the store
    # cannot have a key sent elsewhere.

    def _seal(self, plain: bytes, tenant: str, name: str, url: str | None, field: str) -> bytes:
        return self._vault.seal(plain, "provider", tenant, name, url or "", field)

    def _open(self, sealed: bytes, tenant: str, name: str, url: str | None, field: str) -> bytes:
        return self._vault.open(sealed, "provider", tenant, name, url or "", field)


def check(settings: ProviderSettings) -> None:
    """Raises Invalid, never repeating a key or the value of a header."""
    name, kind, base_url, key = settings.name, settings.kind, settings.base_url, settings.key
    if not _NAME.fullmatch(name):
        raise Invalid(
            "a provider's name has 1 to 32 of a-z, 0-9, _ and -, and begins with a letter"
        )
    if name in _RESERVED:
        raise Invalid(f"{name!r} is the name of Plait's own models: choose another")
    if name in PROVIDERS and kind != name:
        raise Invalid(f"a provider named {name!r} is of kind {name!r}: choose another name")
    if base_url is not None:
        _check_url(base_url)
    if key is not None and (len(key) > KEY_CHARS or not _VALUE.fullmatch(key)):
        raise Invalid(f"a key has 1 to {KEY_CHARS} printable ASCII characters")
    if len(settings.headers) > HEADERS_MAX:
        raise Invalid(f"at most {HEADERS_MAX} headers are allowed")
    seen: set[str] = set()
    for header, value in settings.headers:
        if not _HEADER.fullmatch(header) or header.lower() in _NOT_TO_SET | seen:
            raise Invalid(f"{header[:128]!r} is no header that can be set here, or comes twice")
        if len(value) > HEADER_CHARS or not _VALUE.fullmatch(value):
            raise Invalid(f"the value of {header} is not 1 to {HEADER_CHARS} printable characters")
        seen.add(header.lower())
    if settings.stall_s is not None and not 0 < settings.stall_s <= STALL_MAX_S:
        raise Invalid(f"`stall_s` is above 0 and at most {STALL_MAX_S:g}")


def _check_url(url: str) -> None:
    # A refused address is not repeated: it may hold credentials.
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise Invalid("`base_url` is no address: give http(s)://host[:port][/path]") from None
    if "@" in parts.netloc:
        raise Invalid("`base_url` holds credentials: give them as `key` or `headers`")
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or len(url) > URL_CHARS
        or not (url.isascii() and url.isprintable())
        or " " in url
    ):
        raise Invalid("`base_url` is no address: give http(s)://host[:port][/path]")


def _view(name: str, record: _Record) -> ProviderView:
    return ProviderView(
        name=name,
        kind=record.kind,
        base_url=record.base_url,
        key_set=record.key is not None,
        headers=record.header_names,
        stall_s=record.stall_s,
    )
