"""The few requests to JetStream that the log and its companions are made of, with typed answers.

Raw, because the client library lacks them or does more than is needed: a guarded publish, gets
from the leader, and the stream's state.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec import Struct
from nats import errors as nats_errors
from nats.aio.client import Client

from plait.events.errors import Retryable, Unavailable

REQUEST_S = 2.0  # one try
PATIENCE_S = 10.0  # all tries: longer than a replicated stream takes to elect a leader
RETRY_S = (0.02, 0.5)  # the first pause between tries, and the longest
EXPECTED = "Nats-Expected-Last-Subject-Sequence"

# https://github.com/nats-io/nats-server/blob/main/server/errors.json
STREAM_NOT_FOUND = 10059
NAME_IN_USE = 10058
_NO_MESSAGE = 10037
_WRONG_SEQUENCE = (10071, 10164)  # 10164 on a replicated stream
_SUBJECT_FULL = 10077
_UNAVAILABLE = 503  # the code of answers such as "system temporarily unavailable"


class WrongSequence(Retryable):
    """The subject's last sequence is not the expected one."""


class SubjectFull(Retryable):
    """The subject holds its one message already."""


class ApiError(Unavailable):
    """JetStream refused a request."""

    def __init__(self, subject: str, error: "_Error") -> None:
        super().__init__(f"{subject}: {error.description} ({error.err_code})")
        self.err_code = error.err_code
        self.description = error.description
        self.passing = error.code == _UNAVAILABLE


class StoredMessage(Struct, frozen=True):
    """A message as the leader keeps it."""

    subject: str
    seq: int
    data: bytes = b""
    hdrs: bytes = b""

    def header(self, name: str) -> str | None:
        for line in self.hdrs.split(b"\r\n"):
            key, _, value = line.partition(b":")
            if key == name.encode():
                return value.strip().decode()
        return None

    def expected(self) -> int | None:
        """The sequence before it on its subject, as its writer stated and the server checked."""
        value = self.header(EXPECTED)
        return None if value is None else int(value)


class StreamState(Struct, frozen=True):
    last_seq: int
    consumer_count: int = 0
    subjects: dict[str, int] = {}


class Cluster(Struct, frozen=True):
    leader: str = ""


class StreamInfo(Struct, frozen=True):
    config: dict[str, Any]
    state: StreamState
    cluster: Cluster = Cluster()
    total: int = 0  # of subjects, when they were asked for

    @property
    def metadata(self) -> dict[str, str]:
        found: dict[str, str] = self.config.get("metadata") or {}
        return found


class _Error(Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Failed(Struct, frozen=True):
    error: _Error | None = None


class _PubAck(_Failed, frozen=True):
    seq: int = 0


class _Got(_Failed, frozen=True):
    message: StoredMessage | None = None


_failed = msgspec.json.Decoder(_Failed).decode
_pub_ack = msgspec.json.Decoder(_PubAck).decode
_got = msgspec.json.Decoder(_Got).decode
_json = msgspec.json.Encoder().encode

T = TypeVar("T")
P = ParamSpec("P")


async def patiently(call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Repeats a call that may be repeated while there is no answer, for PATIENCE_S.

    Then raises its Unavailable, and at once what JetStream refuses for good.
    """
    try:
        return await call(*args, **kwargs)
    except Unavailable as error:
        if isinstance(error, ApiError) and not error.passing:
            raise
    loop = asyncio.get_running_loop()
    until = loop.time() + PATIENCE_S
    pause = RETRY_S[0]
    while True:
        await asyncio.sleep(pause)
        pause = min(2 * pause, RETRY_S[1])
        try:
            return await call(*args, **kwargs)
        except Unavailable as error:
            refused = isinstance(error, ApiError) and not error.passing
            if refused or loop.time() > until:
                raise


class Api:
    """Every method raises Unavailable when there is no answer within REQUEST_S."""

    def __init__(self, nc: Client) -> None:
        self.nc = nc

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """The sequence, once the message is stored. Raises WrongSequence and SubjectFull."""
        answer = _pub_ack(await self.request(subject, data, headers))
        if answer.error is None:
            return answer.seq
        if answer.error.err_code in _WRONG_SEQUENCE:
            raise WrongSequence(answer.error.description)
        if answer.error.err_code == _SUBJECT_FULL:
            raise SubjectFull(answer.error.description)
        raise ApiError(subject, answer.error)

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The last message of a subject, from the leader."""
        return await self._get(stream, {"last_by_subj": subject})

    async def at(self, stream: str, sequence: int) -> StoredMessage | None:
        return await self._get(stream, {"seq": sequence})

    async def next(self, stream: str, sequence: int, subject: str) -> StoredMessage | None:
        """The first message from `sequence` on whose subject matches, from the leader."""
        return await self._get(stream, {"seq": sequence, "next_by_subj": subject})

    async def info(self, stream: str, **options: object) -> StreamInfo:
        return await self.call(f"STREAM.INFO.{stream}", options, StreamInfo)

    async def call(self, name: str, body: object, answer: type[T]) -> T:
        """Any other request of the API. Raises ApiError."""
        data = await self.request(f"$JS.API.{name}", _json(body))
        error = _failed(data).error
        if error is not None:
            raise ApiError(name, error)
        return msgspec.json.decode(data, type=answer)

    async def request(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None
    ) -> bytes:
        try:
            message = await self.nc.request(subject, data, timeout=REQUEST_S, headers=headers)
        except nats_errors.NoRespondersError:
            raise Unavailable("JetStream has no leader for this, or the stream is gone") from None
        except nats_errors.TimeoutError:
            raise Unavailable("no answer from JetStream") from None
        except nats_errors.Error as error:
            raise Unavailable(f"NATS: {error or type(error).__name__}") from error
        return message.data

    async def _get(self, stream: str, body: dict[str, object]) -> StoredMessage | None:
        name = f"$JS.API.STREAM.MSG.GET.{stream}"
        answer = _got(await self.request(name, _json(body)))
        if answer.error is not None and answer.error.err_code != _NO_MESSAGE:
            raise ApiError(name, answer.error)
        return answer.message
