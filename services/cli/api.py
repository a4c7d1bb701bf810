"""How the command line talks to a running gateway: plain HTTP, and every failure in one line."""

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

import httpx
import msgspec
from cyclopts import Parameter

from plait.events.errors import Final, Misconfigured, Unavailable
from plait.events.settings import without_password

TIMEOUT_S = 90.0  # above the longest `?wait=` that a gateway grants by default
CONNECT_S = 5.0
PAGE = 100
POSITION = "Plait-Position"
CAUGHT_UP = ": caught up"  # the gateway's comment where the past ends


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Gateway:
    """Which gateway to talk to."""

    url: Annotated[str, Parameter(env_var="PLAIT_URL")] = "http://127.0.0.1:8080"
    "Address of the gateway."
    key: Annotated[str, Parameter(env_var="PLAIT_KEY")] = "dev"
    "The tenant's key."


class Refused(Final):
    """The gateway's own answer: what is wrong, and its stable code."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{detail} ({code})" if code else detail)
        self.status, self.problem = status, code


class LogEvent(NamedTuple):
    position: str
    type: str
    data: Any


class Api:
    """One connection to a gateway. Raises Unavailable when it does not answer, Refused when it
    answers with a problem."""

    def __init__(self, gateway: Gateway | None = None) -> None:
        gateway = gateway or Gateway()
        _check(gateway)
        self._shown = without_password(gateway.url)
        self._http = httpx.Client(
            base_url=gateway.url,
            headers={"Authorization": f"Bearer {gateway.key}"},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S),
            trust_env=False,  # A proxy for the world outside is not for our own gateway.
        )
        self._written: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **query: object) -> Any:
        return self._call("GET", path, query)

    def post(self, path: str, body: dict[str, object], **query: object) -> Any:
        return self._call("POST", path, query, body)

    def patch(self, path: str, body: dict[str, object]) -> Any:
        return self._call("PATCH", path, {}, body)

    def put(self, path: str, body: dict[str, object]) -> Any:
        return self._call("PUT", path, {}, body)

    def delete(self, path: str) -> None:
        self._call("DELETE", path, {})

    def items(self, path: str, limit: int) -> Iterator[Any]:
        """The items of a list, page after page, at most `limit`."""
        token = None
        while limit > 0:
            page = self.get(path, page_size=min(limit, PAGE), page_token=token)
            yield from page["items"][:limit]
            limit -= len(page["items"])
            token = page["next_page_token"]
            if not token:
                return

    @contextmanager
    def live(self, session: str) -> Iterator[Iterator[LogEvent]]:
        """What happens in the session from now on, tokens included, until the gateway ends it."""
        path = f"/v1/sessions/{session}/events"
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)  # there are signs of life
        with (
            self._failures(),
            self._http.stream("GET", _quoted(path), timeout=timeout) as answer,
        ):
            if answer.is_error:
                answer.read()
                raise _refusal(answer)
            lines: Iterator[str] = answer.iter_lines()
            for line in lines:
                if line == CAUGHT_UP:
                    break  # From here on nothing is missed.
            yield _server_sent(lines)

    def events(self, session: str, *, follow: bool) -> Iterator[LogEvent]:
        """The session's events from its first on; without end if `follow`."""
        with (
            self._failures(),
            self._http.stream(
                "GET",
                _quoted(f"/v1/sessions/{session}/events"),
                params={"from": "start"},
                timeout=httpx.Timeout(None, connect=CONNECT_S),
            ) as answer,
        ):
            if answer.is_error:
                answer.read()
                raise _refusal(answer)
            lines: Iterator[str] = answer.iter_lines()
            if not follow:
                lines = itertools.takewhile(lambda line: line != CAUGHT_UP, lines)
            yield from _server_sent(lines)

    def _call(
        self, method: str, path: str, query: dict[str, object], body: object | None = None
    ) -> Any:
        params: dict[str, str] = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in query.items()
            if value is not None
        }
        # What we read covers what we wrote.
        headers = {POSITION: self._written} if method == "GET" and self._written else {}
        with self._failures():
            answer = self._http.request(
                method,
                _quoted(path),
                params=_encodable(params),
                json=_encodable(body),
                headers=headers,
            )
            if answer.is_error:
                raise _refusal(answer)
            result = msgspec.json.decode(answer.content) if answer.content else None
        if method != "GET" and isinstance(result, dict):
            self._written = result.get("position", self._written)
        return result

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise Unavailable(
                f"cannot reach {self._shown}: start it with `plait dev`, or set PLAIT_URL"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise Unavailable(f"{self._shown} broke off its answer: {why}") from None
        except msgspec.MsgspecError:
            raise Unavailable(
                f"{self._shown} does not answer as a gateway of Plait: set PLAIT_URL"
            ) from None


def _check(gateway: Gateway) -> None:
    try:
        parts = urlsplit(gateway.url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx.URL(gateway.url)
    except (ValueError, httpx.InvalidURL):
        sound = False
    if not sound:
        shown = without_password(gateway.url)
        raise Misconfigured(f"PLAIT_URL={shown!r} is no address: it looks like {Gateway.url}")
    if not gateway.key or any(not "!" <= char <= "~" for char in gateway.key):
        raise Misconfigured(
            "PLAIT_KEY is no key: a key is of ASCII letters, digits and signs, without spaces or "
            "line ends"
        )


def _quoted(path: str) -> str:
    # An id that somebody mistyped must not become a query, and may be no Unicode at all.
    return quote(path, safe="/", errors="replace")


def _encodable(value: Any) -> Any:
    """Bytes of a command line that are no UTF-8 cannot be sent; a mark goes in their place."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {name: _encodable(item) for name, item in value.items()}
    return value


def _refusal(answer: httpx.Response) -> Refused:
    try:
        problem = msgspec.json.decode(answer.content, type=dict[str, Any])
    except msgspec.DecodeError:
        problem = {}
    detail = problem.get("detail") or problem.get("title") or answer.reason_phrase
    return Refused(answer.status_code, problem.get("code", ""), str(detail))


def _server_sent(lines: Iterator[str]) -> Iterator[LogEvent]:
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                data = msgspec.json.decode(fields["data"])
                yield LogEvent(fields.get("id", ""), fields.get("event", "message"), data)
            fields = {}
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data" and name in fields:
            fields[name] += "\n" + value
        elif name:  # A line that begins with a colon is a comment: a sign of life.
            fields[name] = value
