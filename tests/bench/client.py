"""A client that costs as little as one can: one connection, one request at a time.

A comfortable client takes longer than the calls that are measured, and would hide them.
"""

import asyncio
from typing import Self
from urllib.parse import urlsplit

import msgspec


class Connection:
    """`async with Connection(url, key) as http`: HTTP/1.1 over keep-alive."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, "the bench's own URLs"
        self._host, self._port, self._key = parts.hostname, parts.port, key

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def post(self, path: str, body: object) -> bytes:
        """The answer's body. Raises RuntimeError for anything but a 2xx."""
        return await self._call("POST", path, msgspec.json.encode(body))

    async def get(self, path: str) -> bytes:
        return await self._call("GET", path, b"")

    async def _call(self, method: str, path: str, body: bytes) -> bytes:
        self._writer.write(
            (
                f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
                f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            ).encode()
            + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        answer = await self._reader.readexactly(int(length or b"0"))
        if head.split(b" ", 2)[1][:1] != b"2":
            raise RuntimeError(f"{method} {path}: {head.decode()}{answer.decode()}")
        return answer
