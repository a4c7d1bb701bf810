"""What the kernel says about processes that are not our children."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from tests.waiting import until


def gone(pid: int) -> bool:
    """A zombie counts as gone: whoever adopted it has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until_gone(pids: Iterable[int]) -> None:
    async def all_gone() -> bool:
        return all(map(gone, pids))

    pids = list(pids)
    await until(all_gone)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    found, look = [], [pid]
    while look:
        below = children.get(look.pop(), [])
        found += below
        look += below
    return found
