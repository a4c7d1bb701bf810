"""kill -9 of a random process every other second under load, and everything must add up.

CHAOS_MINUTES and CHAOS_SEED say how long and which; `make chaos` sets them. The seed
fixes what is asked and what is killed, not how the machine schedules it.
"""

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.checker import check, is_quiet, open_matters
from tests.chaos.load import Load
from tests.chaos.system import Chaos, chaos
from tests.waiting import until

MINUTES = float(os.environ.get("CHAOS_MINUTES", "0.3"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
EVERY_S = (1.0, 2.0)
WORKERS = 2
QUIET_S = 60.0  # until all that was asked has been answered: some take-overs, a few restarts


@pytest.mark.timeout(MINUTES * 60 + 180)
async def test_random_kills_lose_nothing_double_nothing_and_leave_nothing_stuck(
    tmp_path: Path,
) -> None:
    print(f"seed {SEED}, {MINUTES:g} minutes")
    async with chaos(tmp_path) as plait:
        load = Load(plait, await plait.session(), SEED)
        await load.prepare()
        plait.director.actor = load.actor
        await plait.start_workers(WORKERS)
        going = asyncio.Event()
        going.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(going))
            killed = await kill_at_random(plait, random.Random(f"{SEED} kills"))
            going.clear()
        await plait.ready()
        stopped = time.monotonic()
        try:
            await until(lambda: is_quiet(plait), within_s=QUIET_S)
        except TimeoutError:
            pytest.fail(f"seed {SEED}: not quiet after {QUIET_S:g} s: {open_matters(plait)}")
        quiet_s = time.monotonic() - stopped
        found = await check(plait, load)
        print(
            f"killed {dict(killed)}; {len(load.told.posts)} posts, {len(load.told.sends)} sends, "
            f"{load.told.reads} reads; quiet after {quiet_s:.1f} s; {found}"
        )


async def kill_at_random(plait: Chaos, chance: random.Random) -> Counter[str]:
    killed: Counter[str] = Counter()
    end = time.monotonic() + MINUTES * 60
    while time.monotonic() < end:
        await asyncio.sleep(chance.uniform(*EVERY_S))
        names = ["nats", "valkey", "gateway", "replies", "projections"]
        name = chance.choice([*names, *["turns"] * WORKERS])
        if name == "turns":
            await plait.kill_worker(chance.choice([*plait.workers]))
            await plait.start_worker()
        elif name in plait.stack.pids:
            await plait.stack.kill(name)
        killed[name] += 1
    return killed
