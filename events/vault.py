"""Seals what must never lie readable anywhere, such as the keys of providers: AES-256-GCM.

The secret is a setting, not in any store: who gets hold of the stores alone can open nothing.
"""

import base64
import binascii
import hashlib
import hmac
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from plait.events.errors import Misconfigured, NoSecret, WrongSecret

SECRET_BYTES = 32
_VERSION = b"\x01"
_ID_BYTES = 4
_NONCE_BYTES = 12
_HEAD = len(_VERSION) + _ID_BYTES + _NONCE_BYTES


def new_secret() -> str:
    """A value for PLAIT_SECRET."""
    return base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


class Vault:
    """Seals under PLAIT_SECRET. `where` says whose a sealed text is and what it is for: it opens
    nowhere else."""

    def __init__(self, secret: str) -> None:
        """`secret` is 32 bytes in base64, or empty: then nothing can be sealed. Raises
        Misconfigured for anything else, without repeating it."""
        self._id, self._cipher = b"", None
        if not secret:
            return
        try:
            raw = base64.b64decode(secret, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != SECRET_BYTES:
            raise Misconfigured(
                f"PLAIT_SECRET is not {SECRET_BYTES} bytes in base64: make one with "
                f"`openssl rand -base64 {SECRET_BYTES}`"
            )
        self._id = hmac.digest(raw, b"plait secret id", hashlib.sha256)[:_ID_BYTES]
        self._cipher = AESGCM(raw)

    def seal(self, plain: bytes, *where: str) -> bytes:
        """Raises NoSecret."""
        if self._cipher is None:
            raise NoSecret
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, plain, _associated(where))
        return _VERSION + self._id + nonce + sealed

    def open(self, sealed: bytes, *where: str) -> bytes:
        """Raises NoSecret and WrongSecret."""
        if self._cipher is None:
            raise NoSecret
        version, key_id = sealed[:1], sealed[1 : 1 + _ID_BYTES]
        if version != _VERSION or key_id != self._id:
            raise WrongSecret("it was sealed under another PLAIT_SECRET")
        try:
            return self._cipher.decrypt(
                sealed[_HEAD - _NONCE_BYTES : _HEAD], sealed[_HEAD:], _associated(where)
            )
        except InvalidTag:
            raise WrongSecret("it was changed, or sealed for another place") from None


def _associated(where: tuple[str, ...]) -> bytes:
    parts = [part.encode() for part in where]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
