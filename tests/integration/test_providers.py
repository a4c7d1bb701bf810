"""Providers that tenants set over HTTP: kept encrypted, used by workers, and their keys nowhere."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
import pytest_asyncio
from llmock.pytest_plugin import LLMock
from nats.js.errors import NotFoundError

from plait.events.settings import Settings
from plait.events.vault import new_secret
from plait.projections.scripts import connect
from plait.services.cli.api import Api, Gateway
from plait.services.dev.stack import Stack
from plait.services.turns import tenants
from tests.conftest import Address, Prefixes
from tests.integration.gateway import Plait, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "planted-key-zQ7vW2nR9tYx4LmB"
TOKEN = "planted-token-Hk3Pd8sGf6Jw1Cv"
SECRET = new_secret()


@pytest.fixture(scope="module")
def settings_of_all(nats_server: Address, valkey_server: Address, prefixes: Prefixes) -> Settings:
    return Settings(
        nats_url=nats_server.url,
        nats_monitor_url=nats_server.monitor_url,
        redis_url=valkey_server.url,
        prefix=prefixes.next(),
        secret=SECRET,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plait(settings_of_all: Settings) -> AsyncIterator[Plait]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tenants.providers_of, "__kwdefaults__", {"kept_s": 0.0})
        async with running(settings_of_all) as plait:
            yield plait


async def put(plait: Plait, name: str, status: int = 200, **body: object) -> Any:
    return await plait.ask("PUT", f"/v1/providers/{name}", body, status)


async def remove(plait: Plait, name: str) -> int:
    return (await plait.http.delete(f"/v1/providers/{name}")).status_code


async def test_a_provider_is_set_listed_without_its_secrets_replaced_and_removed(
    plait: Plait,
) -> None:
    assert await plait.get("/v1/providers") == {"items": []}
    url = "http://models.test/v1"
    told = await put(
        plait, "mine", kind="openai", base_url=url, key=KEY, headers={"X-Token": TOKEN}, stall_s=9
    )
    assert told == {
        "name": "mine",
        "kind": "openai",
        "base_url": url,
        "key_set": True,
        "headers": ["X-Token"],
        "stall_s": 9.0,
    }
    assert await plait.get("/v1/providers") == {"items": [told]}
    replaced = await put(plait, "mine", kind="anthropic")
    assert (replaced["key_set"], replaced["headers"], replaced["base_url"]) == (False, [], None)
    assert await plait.get("/v1/providers") == {"items": [replaced]}
    assert await remove(plait, "mine") == 204
    assert await plait.get("/v1/providers") == {"items": []}
    assert await remove(plait, "mine") == 404


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "other", "key": KEY},
        {"kind": "openai", "key": [KEY]},
        {"kind": "openai", "base_url": f"http://me:{KEY}@models.test"},
        {"kind": "openai", "key": KEY + "\n"},
        {"kind": "openai", "headers": {"X-A": {"b": KEY}}},
        {"kind": "openai", "key": KEY, "no_such_field": KEY},
        {"key": KEY},
    ],
)
async def test_what_is_no_provider_is_refused_without_repeating_a_secret(
    plait: Plait, body: dict[str, object]
) -> None:
    refused = await plait.ask("PUT", "/v1/providers/bad", body, 400)
    assert refused["code"] == "invalid_request"
    assert KEY not in json.dumps(refused)
    assert await plait.get("/v1/providers") == {"items": []}


async def test_another_tenants_providers_are_not_there(
    plait: Plait, settings_of_all: Settings
) -> None:
    await put(plait, "mine", kind="openai", key=KEY)
    other = msgspec.structs.replace(settings_of_all, tenant="other", key="other's")
    async with running(other) as stranger:
        assert await stranger.get("/v1/providers") == {"items": []}
        assert await remove(stranger, "mine") == 404
        refused = await stranger.post("/v1/sessions", {"model": "mine:m"}, 400)
        assert "there is no model 'mine:m'" in refused["detail"]
        assert "mine:<model>" not in refused["detail"]
    assert len((await plait.get("/v1/providers"))["items"]) == 1
    await remove(plait, "mine")


async def test_a_session_names_only_models_of_providers_that_are_there(plait: Plait) -> None:
    refused = await plait.post("/v1/sessions", {"model": "mine:m"}, 400)
    assert "anthropic:<model>, openai:<model>" in refused["detail"]
    await put(plait, "mine", kind="openai", base_url="http://models.test/v1")
    await plait.post("/v1/sessions", {"model": "mine:m"}, 201)
    await remove(plait, "mine")


async def test_without_a_secret_a_key_is_refused_with_what_to_set(
    settings_of_all: Settings, prefixes: Prefixes
) -> None:
    bare = msgspec.structs.replace(settings_of_all, secret="", prefix=prefixes.next())
    async with running(bare) as plait:
        refused = await put(plait, "mine", 409, kind="openai", key=KEY)
        assert refused["code"] == "no_secret"
        assert "PLAIT_SECRET" in refused["detail"] and KEY not in refused["detail"]
        assert await plait.get("/v1/providers") == {"items": []}
        await put(plait, "mine", kind="openai", base_url="http://models.test/v1")


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_a_model_is_asked_at_the_provider_that_its_name_names(
    plait: Plait, llmock: LLMock, kind: str
) -> None:
    llmock.tool_mode("off")
    await put(plait, "mine", kind=kind, base_url=llmock.base_url(kind), key=KEY)
    session = await plait.session(model="mine:some/model:tag")
    llmock.reply("Here I am.")
    turn = await plait.turn_of(session, "Where are you?")
    assert (turn["status"], turn["text"]) == ("completed", "Here I am.")
    (asked,) = llmock.requests
    assert asked.model == "some/model:tag"
    await remove(plait, "mine")
    turn = await plait.turn_of(session, "And now?")
    assert turn["status"] == "error"
    assert "there is no provider 'mine'" in turn["error"]["message"]


class Telltale:
    """A provider that refuses every call and says everything back that it was sent."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head)
        body = json.dumps({"error": {"message": head, "code": KEY, "type": TOKEN}}).encode()
        writer.write(
            b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\nConnection: close\r\nX-Key: {KEY}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def telltale() -> AsyncIterator[Telltale]:
    made = Telltale()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    async with server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


async def test_nothing_that_a_session_leaves_holds_the_key_of_its_provider(tmp_path: Path) -> None:
    left: dict[str, bytes] = {}
    env = {"PLAIT_LOG_LEVEL": "debug"}
    async with telltale() as provider, Stack(tmp_path / "data", env=env) as stack:
        with Api(Gateway(stack.url, stack.key)) as api:
            for kind in ("openai", "anthropic"):
                left |= await asyncio.to_thread(_failing_turn, api, kind, provider.url)
        sent = "".join(provider.requests)
        assert len(provider.requests) == 2 and KEY in sent and TOKEN in sent
        left |= await _everything_in_nats(stack.nats_url)
        left |= await _everything_in_valkey(stack.redis_url)
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    left |= {str(path): path.read_bytes() for path in files}
    assert len(left) > 40
    assert b"model call failed" in left[str(tmp_path / "data" / "services.log")]
    assert [place for place, data in left.items() if KEY.encode() in data] == []
    assert [place for place, data in left.items() if TOKEN.encode() in data] == []


def _failing_turn(api: Api, kind: str, url: str) -> dict[str, bytes]:
    """What the API says of it, by path."""
    provider: dict[str, object] = {
        "kind": kind,
        "base_url": url,
        "key": KEY,
        "headers": {"X-Token": TOKEN},
    }
    answers: dict[str, Any] = {"put": api.put(f"/v1/providers/{kind}-mine", provider)}
    session = api.post("/v1/sessions", {"model": f"{kind}-mine:m"})["session_id"]
    with api.live(session) as events:
        posted = api.post(f"/v1/sessions/{session}/messages", {"text": "hello"})
        seen = []
        for event in events:
            seen.append(event)
            if event.type == "TurnEnded":
                break
    turn = api.get(f"/v1/turns/{posted['turn_id']}", wait=20)
    assert turn["status"] == "error" and turn["error"]["code"] == "bad_key", turn
    answers |= {"turn": turn, "events": seen}
    for path in ("", "/dag", "/context", "/branches", f"/nodes/{turn['node_id']}"):
        answers[path] = api.get(f"/v1/sessions/{session}{path}")
    answers["providers"] = api.get("/v1/providers")
    return {f"{kind} {path}": json.dumps(told).encode() for path, told in answers.items()}


async def _everything_in_nats(url: str) -> dict[str, bytes]:
    nc = await nats.connect(url)
    found: dict[str, bytes] = {}
    jetstream = nc.jetstream()
    for info in await jetstream.streams_info():
        name = info.config.name
        assert name is not None
        for sequence in range(1, info.state.last_seq + 1):
            try:
                message = await jetstream.get_msg(name, sequence)
            except NotFoundError:
                continue  # replaced
            told = repr(message.headers).encode()
            found[f"{name} {message.subject} {sequence}"] = told + (message.data or b"")
    await nc.close()
    assert any("providers" in name for name in found)
    return found


async def _everything_in_valkey(url: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    async with connect(url) as redis:
        async for key in redis.scan_iter():
            match await redis.type(key):
                case b"string" | "string":
                    value: object = await redis.get(key)
                case b"hash" | "hash":
                    value = await redis.hgetall(key)
                case b"zset" | "zset":
                    value = await redis.zrange(key, 0, -1)
                case b"set" | "set":
                    value = await redis.smembers(key)
                case kind:
                    raise AssertionError(f"{key!r} is a {kind!r}: look into it here")
            found[f"valkey {key!r}"] = repr(value).encode()
    return found


async def test_the_command_line_takes_a_key_from_a_variable_or_from_standard_input(
    tmp_path: Path,
) -> None:
    async with Stack(tmp_path / "data") as stack:
        env = {**os.environ, "PLAIT_URL": stack.url, "PLAIT_KEY": stack.key, "MY_KEY": KEY}

        async def plait(*arguments: str, said: str = "") -> str:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "plait.services.cli.main", "provider", *arguments),
                env=env,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            out, _ = await process.communicate(said.encode())
            assert KEY not in out.decode()
            return f"{process.returncode} {out.decode()}"

        assert (await plait("set", "a", "--kind", "openai", "--key-from", "MY_KEY")).startswith("0")
        header = "--header-from.X-Token=MY_KEY"
        piped = await plait(
            "set", "b", "--kind", "anthropic", "--key-from", "-", header, said=f"{KEY}\n"
        )
        assert piped.startswith("0"), piped
        assert "not set" in await plait("set", "c", "--kind", "openai", "--key-from", "NONE")
        code, _, told = (await plait("list", "--json")).partition(" ")
        listed = json.loads(told)
        assert code == "0"
        assert [(p["name"], p["key_set"], p["headers"]) for p in listed] == [
            ("a", True, []),
            ("b", True, ["X-Token"]),
        ]
        assert (await plait("remove", "a")).startswith("0")
        assert "there is no provider 'a'; there are b" in await plait("remove", "a")


async def test_a_chat_shows_an_answer_while_it_comes_and_once(
    tmp_path: Path, llmock: LLMock
) -> None:
    llmock.tool_mode("off").pace(20)
    words = " ".join(f"word{number}" for number in range(20))
    llmock.reply(words)
    # The environment of the stack's workers points at llmock.
    async with Stack(tmp_path / "data") as stack:
        env = {**os.environ, "PLAIT_URL": stack.url, "PLAIT_KEY": stack.key}
        chat = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-m", "plait.services.cli.main", "chat"),
            *("--model", "openai:m"),
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write(b"hello\n")
        out, early = "", False
        while "word19" not in out:
            more = (await chat.stdout.read(4096)).decode()
            assert more, out
            out += more
            early |= "word3" in out and "word19" not in out
        assert early, "the beginning came before the end"
        rest, _ = await chat.communicate(b"/quit\n")
    shown = " ".join((out + rest.decode()).split())
    assert shown.count(words) == 1, shown
    assert chat.returncode == 0
