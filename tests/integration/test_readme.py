"""What the README tells a newcomer to type works as it is written there."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

from plait.services.dev.stack import Stack

ROOT = Path(__file__).parents[2]


async def test_the_tour_of_the_readme_runs_as_it_is_written(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", readme, re.S)
    (tour,) = [block for block in blocks if "api()" in block]
    async with Stack(tmp_path / "data") as stack:
        tour = tour.replace("http://127.0.0.1:8080", stack.url)
        tour = tour.replace(".venv/bin/plait", f"{sys.executable} -m plait.services.cli.main")
        shell = await asyncio.create_subprocess_exec(
            "bash",
            "-euc",
            tour,
            cwd=tmp_path,
            env={**os.environ, "PLAIT_URL": stack.url},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = (stream.decode() for stream in await shell.communicate())
    assert shell.returncode in (0, 28), errors  # 28: curl's time for the endless stream is up
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert not [answer for answer in answers if "code" in answer], out
    (message,) = [answer for answer in answers if "receipts" in answer]
    assert [receipt["kind"] for receipt in message["receipts"]][-1] == "replied"
    asked = [answer for answer in answers if answer.get("steps") and answer["waits"]]
    assert asked[-1]["text"] == "research answered: “A nautical mile is 1852 metres.”"
    ids = re.findall(r"^id: (\S+)$", out, re.M)
    assert len(ids) == len(set(ids)) > 20
