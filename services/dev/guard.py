"""The guard between `plait dev` and one server: when we die, however we die, the server dies too.

Run as a script: `guard.py COMMAND…`. Its standard input is a pipe that the parent holds open and
never writes to, so its end means that the parent is gone, also by `kill -9`, on Linux and macOS
alike. It prints the command's process id, passes SIGTERM on, and exits as the command did.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys


def main() -> int:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)  # Each signal arrives as a byte: none is lost, no handler races.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    command = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        stdout=2,
        close_fds=False,  # The lock on the data directory lives as long as the command.
        start_new_session=True,  # Ctrl-C is for the parent; and a group can be killed whole.
        preexec_fn=_die_with_the_guard if sys.platform == "linux" else None,
    )
    os.write(1, b"%d\n" % command.pid)
    while command.poll() is None:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready and signal.SIGTERM in os.read(woken, 4096):
            command.terminate()
        if 0 in ready and not os.read(0, 1):
            _kill_group(command.pid)
            command.wait()
    _kill_group(command.pid)  # What the command had started must not outlive it either.
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def _kill_group(leader: int) -> None:
    # macOS answers EPERM when only zombies are left in the group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _die_with_the_guard() -> None:
    # Where the system offers it, a guard and its parent killed at one stroke leave nothing.
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
