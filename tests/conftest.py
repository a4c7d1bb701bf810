"""Real servers for all tests, started once per run."""

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio
from docker.errors import DockerException
from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

from plait.events.settings import Settings
from plait.services.dev.servers import NatsServer, ValkeyServer

NATS_IMAGE = "nats:2.12-alpine"
VALKEY_IMAGE = "redis:7-alpine"
NATS_CONF = """
port: 4222
http: 8222
jetstream { store_dir: /data, sync_interval: always }
"""


class Address(NamedTuple):
    """Where a shared server is."""

    url: str
    monitor_url: str = ""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Address]:
    """NATS with JetStream and `sync_interval: always`, as `plait dev` runs it. Shared: work under
    a prefix of your own, and start another one to kill it."""
    folder = tmp_path_factory.mktemp("nats")
    if not docker_answers():
        async with NatsServer(folder) as server:
            yield Address(server.url, server.monitor_url)
        return
    (folder / "nats.conf").write_text(NATS_CONF)
    container = (
        DockerContainer(NATS_IMAGE)
        .with_exposed_ports(4222, 8222)
        .with_volume_mapping(str(folder), "/etc/plait", "ro")
        .with_command("--config /etc/plait/nats.conf")
        .waiting_for(LogMessageWaitStrategy("Server is ready"))
    )
    with container:
        host = container.get_container_host_ip()
        yield Address(
            f"nats://{host}:{container.get_exposed_port(4222)}",
            f"http://{host}:{container.get_exposed_port(8222)}",
        )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Address]:
    """Valkey, shared: keys start with the prefix of your settings."""
    if not docker_answers():
        async with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
            yield Address(server.url)
        return
    container = (
        DockerContainer(VALKEY_IMAGE)
        .with_exposed_ports(6379)
        .waiting_for(LogMessageWaitStrategy("Ready to accept connections"))
    )
    with container:
        host = container.get_container_host_ip()
        yield Address(f"redis://{host}:{container.get_exposed_port(6379)}/0")


def docker_answers() -> bool:
    """Where a Docker daemon answers, the shared servers are containers of the oldest versions that
    we support; elsewhere, and for all that is killed, the newest come from wheels."""
    try:
        return bool(DockerClient(timeout=2).client.ping())
    except (DockerException, OSError):
        return False


@pytest.fixture(scope="session")
def prefixes() -> "Prefixes":
    return Prefixes()


class Prefixes:
    """A new prefix for each test, so that the servers can be shared."""

    def __init__(self) -> None:
        self._made = 0

    def next(self) -> str:
        self._made += 1
        return f"test{self._made}"


@pytest.fixture
def settings(nats_server: Address, valkey_server: Address, prefixes: Prefixes) -> Settings:
    return Settings(
        nats_url=nats_server.url,
        nats_monitor_url=nats_server.monitor_url,
        redis_url=valkey_server.url,
        prefix=prefixes.next(),
    )
