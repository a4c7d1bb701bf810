"""A whole Plait for the gateway's tests: every service in this process, on real servers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import msgspec

from plait.events.settings import Settings
from plait.projections import worker as projections
from plait.services.dev.servers import free_port
from plait.services.gateway import worker as gateway
from plait.services.replies import worker as replies
from plait.services.turns import worker as turns
from plait.services.turns.models import Answer, ChatModel, Echo, Request
from tests.waiting import until

HELD = "test:held"
STOP_S = 25.0  # what a service may take to end when it is cancelled


class Held:
    """Echoes; a message that begins with `hold` is answered only when the test lets go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def answer(self, request: Request) -> Answer:
        if request.messages[-1]["content"].startswith("hold"):
            await self.let_go.wait()
        return await Echo().answer(request)


class Event(NamedTuple):
    id: str
    type: str
    data: dict[str, Any]


class Plait:
    """Its API as a client meets it."""

    def __init__(self, settings: Settings, held: Held) -> None:
        self.settings, self.held = settings, held
        self.url = f"http://{settings.host}:{settings.port}"
        self.http = self.client()

    def client(self, key: str | None = None, **headers: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key or self.settings.key}", **headers},
            timeout=30,
            trust_env=False,
        )

    async def get(self, path: str, status: int = 200, **query: object) -> Any:
        return await self.ask("GET", path, None, status, query)

    async def post(self, path: str, body: object = None, status: int = 202, **query: object) -> Any:
        return await self.ask("POST", path, body, status, query)

    async def ask(
        self,
        method: str,
        path: str,
        body: object,
        status: int,
        query: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        answer = await self.http.request(method, path, json=body, params=query, headers=headers)
        assert answer.status_code == status, answer.text
        if status >= 400:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == status
        return answer.json()

    async def session(self, **body: object) -> str:
        made = await self.post("/v1/sessions", body, 201)
        session: str = made["session_id"]
        return session

    async def say(
        self, session: str, text: str, *, run: bool = False, status: int = 202, **body: Any
    ) -> Any:
        """Posts a message; without `run` nothing but the node comes of it."""
        return await self.post(
            f"/v1/sessions/{session}/messages", {"text": text, "run": run, **body}, status
        )

    async def turn_of(self, session: str, text: str, **body: object) -> Any:
        """Posts a message and waits for the end of its turn."""
        return await self.post(
            f"/v1/sessions/{session}/messages", {"text": text, **body}, 200, wait=20
        )

    async def holding(self, session: str, **body: Any) -> Any:
        """Posts a message whose turn runs until the test lets go."""
        posted = await self.say(session, "hold on", run=True, **body)

        async def running() -> bool:
            turn = await self.get(f"/v1/turns/{posted['turn_id']}", min_position=posted["position"])
            return bool(turn["status"] == "running")

        await until(running)
        return posted

    async def events(
        self, session: str, *, after: str | None = None, **query: str
    ) -> AsyncGenerator[Event, None]:
        headers = {"Last-Event-ID": after} if after else {}
        async with (
            self.client() as http,
            http.stream(
                "GET", f"/v1/sessions/{session}/events", headers=headers, params=query
            ) as answer,
        ):
            assert answer.status_code == 200
            fields: dict[str, str] = {}
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                    continue
                if "event" in fields:
                    yield Event(
                        fields.get("id", ""), fields["event"], msgspec.json.decode(fields["data"])
                    )
                fields = {}


@asynccontextmanager
async def running(
    settings: Settings, models: Mapping[str, ChatModel] = MappingProxyType({})
) -> AsyncIterator[Plait]:
    """All four services until the block ends."""
    settings = msgspec.structs.replace(settings, port=free_port(), model=HELD)
    held = Held()
    services = [
        asyncio.create_task(gateway.run(settings), name="gateway"),
        asyncio.create_task(turns.run(settings, {HELD: held, **models}), name="turns"),
        asyncio.create_task(replies.run(settings), name="replies"),
        asyncio.create_task(projections.run(settings), name="projections"),
    ]
    plait = Plait(settings, held)

    async def ready() -> bool:
        for service in services:
            if service.done():
                service.result()
        try:
            return (await plait.http.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    try:
        await until(ready)
        yield plait
    finally:
        held.let_go.set()
        await plait.http.aclose()
        for service in services:
            service.cancel()
        _, late = await asyncio.wait(services, timeout=STOP_S)
        for service in late:
            service.print_stack()
        assert not late, f"did not stop when cancelled: {[s.get_name() for s in late]}"
