"""Real servers for all tests, started once per run."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from plait.events.settings import Settings
from plait.services.dev.servers import NatsServer, ValkeyServer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    """NATS with JetStream and `sync_interval: always`, as `plait dev` runs it. Shared: work under
    a prefix of your own, and start another one to kill it."""
    async with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ValkeyServer]:
    """Valkey, shared: keys start with the prefix of your settings."""
    async with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


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
def settings(nats_server: NatsServer, valkey_server: ValkeyServer, prefixes: Prefixes) -> Settings:
    return Settings(
        nats_url=nats_server.url,
        nats_monitor_url=nats_server.monitor_url,
        redis_url=valkey_server.url,
        prefix=prefixes.next(),
    )
