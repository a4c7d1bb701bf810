"""The parent's half of the guard: start a program that cannot outlive us, and hear of its end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait.services.dev import guard

STOP_S = 10.0  # from SIGTERM to SIGKILL


class Child:
    """A running program under its guard. Bound to no event loop."""

    def __init__(self, process: "subprocess.Popen[bytes]", pid: int) -> None:
        self._guard = process
        self.pid = pid

    @classmethod
    async def start(
        cls,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        log: int | None = None,
        keep: Sequence[int] = (),
    ) -> "Child":
        """`log` takes what the program writes (our own stderr when None); the program inherits
        the descriptors in `keep`. Raises OSError when the program cannot be started."""
        process = subprocess.Popen(  # noqa: ASYNC220 - an asyncio one would be tied to this loop
            # -I and -S: the guard needs the standard library alone, and starts in 20 ms.
            [sys.executable, "-I", "-S", guard.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=keep,
            start_new_session=True,
            env=env,
        )
        try:
            assert process.stdout is not None
            await _readable(process.stdout.fileno())
            answer = os.read(process.stdout.fileno(), 32)
            if not answer:
                raise OSError(f"{command[0]} cannot be started")
        except BaseException:
            process.kill()
            _release(process)
            raise
        return cls(process, int(answer))

    @property
    def alive(self) -> bool:
        return self._guard.poll() is None

    async def wait(self) -> int:
        """The exit code, as a shell gives it, once the program and its guard have ended."""
        assert self._guard.stdout is not None
        if not self._guard.stdout.closed:
            await _readable(self._guard.stdout.fileno())  # its end: nobody writes a second line
        code = _release(self._guard)
        if code == -signal.SIGKILL:  # The guard itself was killed: finish its work.
            self._signal(signal.SIGKILL)
        return code

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after `STOP_S`."""
        if self.alive:
            self._guard.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await self.wait()
            except TimeoutError:
                await self.kill()
        await self.wait()

    async def kill(self) -> None:
        """SIGKILL to the program itself, as an out-of-memory killer would."""
        if self.alive:
            self._signal(signal.SIGKILL)
        await self.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _release(process: "subprocess.Popen[bytes]") -> int:
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return code


async def _readable(fd: int) -> None:
    # A duplicate of its own, since a loop keeps one reader per descriptor and several may wait.
    fd = os.dup(fd)
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
