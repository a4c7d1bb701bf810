"""All of Plait in one process tree: NATS, Valkey and one process of each service, kept alive.

Whatever dies is started again, so a killed process heals by itself; when we die, all of it dies.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, Self

import httpx
import structlog

from plait.events.errors import Misconfigured, PlaitError
from plait.events.settings import Settings
from plait.events.vault import new_secret
from plait.services.dev.child import Child
from plait.services.dev.servers import NatsServer, PortInUse, ValkeyServer, free_port, is_free

SERVICES = ("gateway", "turns", "replies", "projections")

USUAL_PORTS = (4222, 8222, 6379)  # of NATS, its monitoring and Valkey: where others look

READY_S = 60.0  # from the start of the services to /readyz
EARLY_ENDS = 3  # of one service before the stack is ready: it will not come up
RESTART_MIN_S = 0.05  # a killed worker's turn should go on within seconds
RESTART_MAX_S = 5.0
STEADY_S = 10.0  # a process that lived this long may restart at once again
POLL_S = 0.05
LOOK_S = 1.0  # between two looks at the data directory
LOG_TAIL_BYTES = 2000

log = structlog.get_logger()


class Service:
    """One of our own services as a child process, configured by environment variables."""

    def __init__(self, name: str, env: Mapping[str, str], log_file: Path | None) -> None:
        self.name = name
        self._env = env
        self._log_file = log_file
        self._child: Child | None = None

    @property
    def started(self) -> bool:
        return self._child is not None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        command = [sys.executable, "-m", "plait.services.cli.main", self.name]
        if self._log_file is None:
            self._child = await Child.start(command, env=self._env)
            return
        output = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._child = await Child.start(command, env=self._env, log=output)
        finally:
            os.close(output)

    async def wait(self) -> int:
        assert self._child is not None
        return await self._child.wait()

    async def kill(self) -> None:
        assert self._child is not None
        await self._child.kill()

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()


Member = Service | NatsServer | ValkeyServer


class Stack:
    """`async with Stack(data) as stack`: ready when the gateway says so.

    `port` 0 chooses a free one. The servers take free ports, or the usual ones where those are
    free with `usual_ports`. The services write their logs to `services.log` in the data directory,
    or to our standard error with `log_to_stderr`. `env` adds settings for the services; those that
    `services` leaves out are the caller's to run. Raises Misconfigured when something does not
    come up.
    """

    def __init__(
        self,
        data: Path,
        *,
        port: int = 0,
        model: str | None = None,
        usual_ports: bool = False,
        log_to_stderr: bool = False,
        env: Mapping[str, str] = MappingProxyType({}),
        services: Sequence[str] = SERVICES,
    ) -> None:
        self.data, self._services = data, services
        self._port, self._model, self._extra = port, model, env
        self._log_file = None if log_to_stderr else data / "services.log"
        nats, monitor, valkey = (
            port if usual_ports and is_free(port) else 0 for port in USUAL_PORTS
        )
        self._nats = NatsServer(data / "nats", port=nats, monitor_port=monitor)
        self._valkey = ValkeyServer(data / "valkey", port=valkey)
        self._members: dict[str, Member] = {"nats": self._nats, "valkey": self._valkey}
        self._keepers: list[asyncio.Task[None]] = []
        self._early_end: asyncio.Future[str] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def url(self) -> str:
        host = self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._settings.port}"

    @property
    def key(self) -> str:
        return self._settings.key

    @property
    def nats_url(self) -> str:
        return self._nats.url

    @property
    def monitor_url(self) -> str:
        return self._nats.monitor_url

    @property
    def redis_url(self) -> str:
        return self._valkey.url

    @property
    def pids(self) -> dict[str, int]:
        """By name: nats, valkey and the services. A restart changes one; a server whose restart
        failed is missing until the next try."""
        return {name: member.pid for name, member in self._members.items() if member.started}

    async def until_lost(self) -> NoReturn:
        """Raises StoreGone when the data directory is deleted or moved under the servers."""
        while True:
            self._nats.check_directory()
            self._valkey.check_directory()
            await asyncio.sleep(LOOK_S)

    async def kill(self, name: str) -> None:
        """`kill -9`; the process comes back by itself."""
        await self._members[name].kill()

    async def _start(self) -> None:
        env = {**os.environ, **self._extra}
        # Before anything is started: what the environment says of the rest, and where to listen.
        host = Settings.from_env(env, model=self._model).host
        port = self._port or free_port(host)
        if not is_free(port, host):
            raise PortInUse("the gateway", port)
        await _all(self._nats.start(), self._valkey.start())
        self._settings = Settings.from_env(
            env,
            nats_url=self._nats.url,
            nats_monitor_url=self._nats.monitor_url,
            redis_url=self._valkey.url,
            port=port,
            model=self._model,
        )
        env |= {
            f"PLAIT_{name.upper()}": str(getattr(self._settings, name))
            for name in ("nats_url", "nats_monitor_url", "redis_url", "port", "model")
        }
        env["PLAIT_SECRET"] = self._settings.secret or secret_of(self.data)
        for name in self._services:
            self._members[name] = Service(name, env, self._log_file)
        await _all(*(self._members[name].start() for name in self._services))
        self._early_end = asyncio.get_running_loop().create_future()
        for name, member in self._members.items():
            self._keepers.append(asyncio.create_task(self._keep(name, member), name=f"keep {name}"))
        await self._until_ready()

    async def _until_ready(self) -> None:
        assert self._early_end is not None
        ready = asyncio.create_task(_answers(f"{self.url}/readyz"))
        try:
            await asyncio.wait(
                (ready, self._early_end), timeout=READY_S, return_when=asyncio.FIRST_COMPLETED
            )
            if self._early_end.done():
                raise Misconfigured(self._early_end.result() + self._log_tail())
            if not ready.done():
                raise Misconfigured(
                    f"the gateway is not ready after {READY_S:.0f} s" + self._log_tail()
                )
            ready.result()
            self._early_end.cancel()
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    def _log_tail(self) -> str:
        if self._log_file is None or not self._log_file.exists():
            return ""
        tail = self._log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"; {self._log_file} ends with:\n{tail}"

    async def _keep(self, name: str, member: Member) -> None:
        """Starts the member again whenever it ends."""
        clock = asyncio.get_running_loop().time
        delay, ends = RESTART_MIN_S, 0
        while True:
            started = clock()
            code = await member.wait()
            if clock() - started > STEADY_S:
                delay = RESTART_MIN_S
            ends += 1
            if ends >= EARLY_ENDS and self._early_end is not None and not self._early_end.done():
                self._early_end.set_result(f"{name} does not come up (exit code {code})")
            running = False
            while not running:
                log.warning(
                    "a process ended and is started again",
                    process=name,
                    exit_code=code,
                    delay_s=round(delay, 2),
                )
                await asyncio.sleep(delay)
                delay = min(delay * 2, RESTART_MAX_S)
                try:
                    await member.start()
                    running = True
                except (PlaitError, OSError) as error:
                    log.error(  # noqa: TRY400 - the reason says it, where it came from does not matter
                        "a process could not be started", process=name, reason=str(error)
                    )

    async def _stop(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        services = [member for member in self._members.values() if isinstance(member, Service)]
        # The servers go last: a service that stops still finishes what it holds.
        await asyncio.gather(*(service.stop() for service in services))
        await asyncio.gather(self._nats.stop(), self._valkey.stop())


def secret_of(data: Path) -> str:
    """What the keys in this data directory are encrypted with; made at the first start."""
    path = data / "secret"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(new_secret() + "\n")
    except FileExistsError:
        pass
    secret = path.read_text().strip()
    if not secret:  # We died while it was written, so nothing was encrypted with it yet.
        path.unlink()
        return secret_of(data)
    return secret


async def _all(*starts: Awaitable[None]) -> None:
    """Waits for every start, also when one fails, so that nothing starts behind our back."""
    for outcome in await asyncio.gather(*starts, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _answers(url: str) -> None:
    """Returns when the URL answers 200."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(POLL_S)
