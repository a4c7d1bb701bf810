"""`make bench`: what Plait costs beside what it stands on, as ratios inside one run.

    python -m tests.bench [GROUP...] [--json]

A missed bar is printed, and ends with 0 all the same: the machine is shared. Only what broke
ends with 1.
"""

import asyncio
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated

import cyclopts
import uvloop
from rich.console import Console

from plait.services.dev.servers import nats_binary, valkey_binary
from tests.bench.report import Figure, print_json, print_table

GROUPS = {  # name → module, each with a function of the name; in the order in which they run
    "append": "log",
    "replay": "log",
    "http": "http",
    "turn": "turns",
    "echo": "turns",
    "thousand": "turns",
    "takeover": "takeover",
    "waits": "waits",
    "models": "models",
}

GROUP_S = 300.0  # several times what the longest takes on two idle cores

Group = Callable[[Path], AsyncIterator[Figure]]

app = cyclopts.App(name="python -m tests.bench", help=__doc__)


@app.default
def bench(*names: str, json: Annotated[bool, cyclopts.Parameter(negative="")] = False) -> int:
    """Measure all groups, or those that are named."""
    for name in names:
        if name not in GROUPS:
            sys.exit(f"there is no group {name!r}: choose from {', '.join(GROUPS)}")
    facts = machine()
    console = Console(stderr=json)
    console.print(", ".join(f"{name} {fact}" for name, fact in facts.items()), highlight=False)
    figures: list[Figure] = []
    broken: list[str] = []
    for name in names or GROUPS:
        began = time.monotonic()
        try:
            figures += uvloop.run(_measured(name))
        except Exception:  # noqa: BLE001 - one group that broke must not hide the others
            broken.append(f"{name} broke:\n{traceback.format_exc()}")
        console.print(f"{name}: {time.monotonic() - began:.0f} s", highlight=False)
    if json:
        print_json(facts, figures, broken)
    else:
        console.print()
        print_table(figures, broken)
    return 1 if broken else 0


async def _measured(name: str) -> list[Figure]:
    group: Group = getattr(importlib.import_module(f"tests.bench.{GROUPS[name]}"), name)
    with tempfile.TemporaryDirectory(prefix=f"plait-bench-{name}-") as data:
        async with asyncio.timeout(GROUP_S):
            return [figure async for figure in group(Path(data))]


def machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": str(os.cpu_count()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "nats-server": _version(nats_binary()).removeprefix("nats-server: v"),
        "valkey": _version(valkey_binary()).partition("v=")[2].partition(" ")[0],
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _version(binary: Path) -> str:
    asked = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


if __name__ == "__main__":
    sys.exit(app())
