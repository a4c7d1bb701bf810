"""A process of turns with models that take a known time: what a worker costs, and not a model.

python -m tests.bench.worker      settings come from PLAIT_… variables, as for `plait turns`
"""

import asyncio

import uvloop

from plait.events.settings import Settings
from plait.services.cli.logs import log_to_stderr
from plait.services.turns import worker
from plait.services.turns.models import Answer, Request

MODEL_S = {"bench:2s": 2.0, "bench:8s": 8.0}


class Slow:
    """Answers after a while, and costs nothing until then."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def answer(self, request: Request) -> Answer:
        await asyncio.sleep(self._seconds)
        return Answer(text="done")


if __name__ == "__main__":
    settings = Settings.from_env()
    log_to_stderr(settings.log_level, process="bench-worker")
    uvloop.run(worker.run(settings, {name: Slow(s) for name, s in MODEL_S.items()}))
