"""`plait dev` as a user meets it: one process tree that heals, and leaves nothing behind."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import pytest_asyncio

from plait.services.cli.api import Api, Gateway
from plait.services.dev.stack import SERVICES, Stack
from tests.integration.processes import descendants, gone, parent_of, until_gone
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAIT = [sys.executable, "-m", "plait.services.cli.main"]
WAIT_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


async def restarted(stack: Stack, name: str, before: int) -> None:
    async def is_another() -> bool:
        return stack.pids[name] != before

    await until(is_another)


async def ready(stack: Stack) -> None:
    async def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get(f"{stack.url}/readyz")).status_code == 200
        return False

    async with httpx.AsyncClient() as client:
        await until(answers)


def say(stack: Stack, text: str) -> str:
    """Posts in a new session; the turn's final text."""
    with Api(Gateway(stack.url, stack.key)) as api:
        session = api.post("/v1/sessions", {})["session_id"]
        posted = api.post(f"/v1/sessions/{session}/messages", {"text": text})
        turn = api.get(f"/v1/turns/{posted['turn_id']}", wait=WAIT_S)
    assert turn["status"] == "completed", turn
    spoken: str = turn["text"]
    return spoken


async def test_a_message_is_answered(stack: Stack) -> None:
    assert await asyncio.to_thread(say, stack, "hello")


@pytest.mark.parametrize("name", [*SERVICES, "nats", "valkey"])
async def test_a_killed_process_comes_back_and_turns_go_on(stack: Stack, name: str) -> None:
    before = stack.pids[name]
    await stack.kill(name)
    await restarted(stack, name, before)
    await ready(stack)
    assert await asyncio.to_thread(say, stack, f"after {name}")


async def test_a_killed_guard_is_replaced_with_its_process(stack: Stack) -> None:
    before = stack.pids["turns"]
    os.kill(parent_of(before), signal.SIGKILL)
    await restarted(stack, "turns", before)
    await until_gone([before])


# -- the other commands, on the running stack ------------------------------------------------


def plait(
    stack: Stack, *arguments: str, typed: str = "", **changed: str
) -> "subprocess.CompletedProcess[str]":
    env = {
        **os.environ,
        "COLUMNS": "120",
        "PLAIT_URL": stack.url,
        "PLAIT_KEY": stack.key,
        "PLAIT_NATS_URL": stack.nats_url,
        "PLAIT_NATS_MONITOR_URL": stack.monitor_url,
        "PLAIT_REDIS_URL": stack.redis_url,
        **changed,
    }
    return subprocess.run(
        [*PLAIT, *arguments], env=env, input=typed, capture_output=True, text=True, check=False
    )


def printed(stack: Stack, *arguments: str, typed: str = "") -> str:
    done = plait(stack, *arguments, typed=typed)
    assert done.returncode == 0, done
    return done.stdout


@pytest.fixture(scope="module")
def chatted(stack: Stack) -> tuple[str, str]:
    """A session on which two branches talked, and what the chat printed."""
    began = printed(stack, "chat", typed="we sail\n/name writer\n")
    session = began.split()[1]
    typed = (
        f"/fork {session}-_-root A nautical mile is 1852 metres.\n/name research\n"
        "/branch writer\nask research: How long is a nautical mile?\n"
        "/send research What is a nautical mile?\n/branches\n/nonsense\n/branch nowhere\n"
        f"/dag\n/checkout {session}-_-root\nfrom the root\n/quit\nnever read\n"
    )
    return session, printed(stack, "chat", session, typed=typed)


async def test_chat_forks_names_asks_sends_and_draws(chatted: tuple[str, str]) -> None:
    session, said = chatted
    for line in (
        "■ send_to_branch ⇢ research: How long is a nautical mile? ⇠ A nautical mile is 1852",
        "△ research answered: “A nautical mile is 1852 metres.”",
        "⇠ research: A nautical mile is 1852 metres.",
        "● writer       live",
        "/nonsense is no command; /help lists them",
        "there is no branch 'nowhere'; the live branches are writer, research",
        "○   │   writer    we sail",
        f"HEAD is at {session}-_-root",
        "△ I have read “from the root”.",
    ):
        assert line in said
    assert "never read" not in said


async def test_sessions_lists_the_newest_first(stack: Stack, chatted: tuple[str, str]) -> None:
    assert json.loads(printed(stack, "sessions", "--json"))[0]["session_id"] == chatted[0]
    assert printed(stack, "sessions", "--limit", "1").startswith(chatted[0])


async def test_log_prints_every_event_and_ends(stack: Stack, chatted: tuple[str, str]) -> None:
    lines = printed(stack, "log", chatted[0]).splitlines()
    objects = [
        json.loads(line) for line in printed(stack, "log", chatted[0], "--json").splitlines()
    ]
    assert [line.split()[2] for line in lines] == [item["event"] for item in objects]
    assert objects[0]["event"] == "SessionCreated"
    assert objects[-1]["event"] == "TurnEnded"
    assert "content=ask research: How long is a nautical mile?" in "\n".join(lines)


async def test_context_shows_what_a_branch_would_see(
    stack: Stack, chatted: tuple[str, str]
) -> None:
    seen = printed(stack, "context", chatted[0], "--head", "writer")
    assert "user\nask research: How long is a nautical mile?" in seen
    assert "tool send_to_branch\nA nautical mile is 1852 metres." in seen
    assert "from the root" not in seen
    answer = json.loads(printed(stack, "context", chatted[0], "--json"))
    assert answer["messages"][0]["content"] == "from the root"
    assert f"digest {answer['digest']}" in printed(stack, "context", chatted[0])


async def test_dag_draws_and_tells(stack: Stack, chatted: tuple[str, str]) -> None:
    answer = json.loads(printed(stack, "dag", chatted[0], "--json"))
    drawn = printed(stack, "dag", chatted[0])
    assert all(drawn.count(mark) for mark in "◇○△■")
    nodes = [line for line in drawn.splitlines() if any(mark in line for mark in "◇○△■")]
    assert len(nodes) == len(answer["nodes"])


async def test_what_the_gateway_refuses_is_one_line(stack: Stack) -> None:
    done = plait(stack, "dag", "s234567234567")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("plait: there is no session 's234567234567'; ")
    assert done.stderr.endswith("(unknown_session)\n")
    assert done.stderr.count("\n") == 1


async def test_doctor_finds_a_healthy_stack_healthy(stack: Stack) -> None:
    await ready(stack)
    findings = {item["what"]: item for item in json.loads(printed(stack, "doctor", "--json"))}
    assert {item["state"] for item in findings.values()} == {"ok"}
    assert findings["durability"]["found"] == "acknowledged means on disk"
    assert "✓ read models" in printed(stack, "doctor")


async def test_doctor_says_what_to_do_about_servers_that_are_not_there(stack: Stack) -> None:
    env = {"PLAIT_NATS_URL": "nats://127.0.0.1:1", "PLAIT_REDIS_URL": "redis://127.0.0.1:1/0"}
    done = subprocess.run(  # noqa: ASYNC221 - nothing else runs meanwhile
        [*PLAIT, "doctor"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "✗ NATS" in done.stdout
    assert "✗ Valkey" in done.stdout
    assert "→ start it, or set PLAIT_NATS_URL" in done.stdout


async def test_doctor_judges_the_log_as_a_service_would(stack: Stack) -> None:
    done = plait(stack, "doctor", "--json", PLAIT_NATS_MONITOR_URL="")
    (durability,) = [f for f in json.loads(done.stdout) if f["what"] == "durability"]
    assert (done.returncode, durability["state"]) == (1, "wrong")
    assert "PLAIT_NATS_MONITOR_URL" in durability["todo"] + durability["found"]
    assert plait(stack, "rebuild", PLAIT_NATS_MONITOR_URL="").returncode == 1


@pytest.mark.parametrize(("name", "shown"), [("valkey", "Valkey"), ("nats", "NATS")])
async def test_doctor_finds_a_server_that_hangs(stack: Stack, name: str, shown: str) -> None:
    os.kill(stack.pids[name], signal.SIGSTOP)
    try:
        done = await asyncio.to_thread(plait, stack, "doctor")
    finally:
        os.kill(stack.pids[name], signal.SIGCONT)
    assert done.returncode == 1
    assert f"✗ {shown}" in done.stdout
    assert "nothing answers at" in done.stdout
    await ready(stack)


async def test_a_reader_that_leaves_early_is_no_fault(
    stack: Stack, chatted: tuple[str, str]
) -> None:
    for command in (["log", chatted[0]], ["demo"]):
        with subprocess.Popen(  # noqa: ASYNC220
            [*PLAIT, *command],
            env={**os.environ, "PLAIT_URL": stack.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            errors = await asyncio.to_thread(process.stderr.read)
        assert errors == b""


async def test_rebuild_swaps_in_a_new_generation(stack: Stack, chatted: tuple[str, str]) -> None:
    before = printed(stack, "dag", chatted[0], "--json")
    first, second = (
        json.loads(printed(stack, "rebuild", "--json"))["generation"] for _ in range(2)
    )
    assert first != second
    after = printed(stack, "dag", chatted[0], "--json")
    assert json.loads(after)["nodes"] == json.loads(before)["nodes"]


# -- demo and dev ----------------------------------------------------------------------------


async def test_the_demo_ends_well_and_shows_the_answer() -> None:
    done = subprocess.run([*PLAIT, "demo"], capture_output=True, text=True, check=False)  # noqa: ASYNC221
    assert done.returncode == 0, done
    assert "△ research answered: “A nautical mile is 1852 metres.”" in done.stdout
    assert "╰▸○   research  ⇢ How long is a nautical mile?" in done.stdout


async def test_the_demo_tells_its_result_in_json() -> None:
    done = subprocess.run(  # noqa: ASYNC221
        [*PLAIT, "demo", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done
    result = json.loads(done.stdout)
    assert result["ok"]
    assert result["reply"] in result["answer"]
    assert result["receipts"] == ["accepted", "delivered", "consumed", "replied"]


@contextlib.contextmanager
def running(
    data: Path, *arguments: str, errors: IO[str] | int = subprocess.DEVNULL
) -> "Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]":
    """`plait dev --json`, ready; and what it announced."""
    command = [*PLAIT, "dev", "--json", "--port", "0", "--data", str(data), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


async def test_dev_announces_itself_in_one_line_and_stops_cleanly(tmp_path: Path) -> None:
    with running(tmp_path) as (process, announced):
        assert set(announced) == {"url", "key", "nats", "valkey"}
        with Api(Gateway(announced["url"], announced["key"])) as api:
            session = api.post("/v1/sessions", {"title": "kept"})["session_id"]
        below = descendants(process.pid)
        assert len(below) >= 2 * (len(SERVICES) + 2)  # each with its guard
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert all(map(gone, below))
    with (
        running(tmp_path) as (process, announced),
        Api(Gateway(announced["url"], announced["key"])) as api,
    ):
        assert [item["session_id"] for item in api.get("/v1/sessions")["items"]] == [session]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


async def test_dev_tells_how_it_starts_what_others_need_and_that_it_has_stopped(
    tmp_path: Path,
) -> None:
    command = [*PLAIT, "dev", "--port", "0", "--data", str(tmp_path)]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(  # noqa: ASYNC220
            command, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("starting NATS, Valkey and 4 services")
        banner = ""
        while "PLAIT_SECRET" not in banner:
            line = await asyncio.to_thread(process.stdout.readline)
            assert line, "it ended"
            banner += line
        exports = "\n".join(line for line in banner.splitlines() if "export" in line)
        exported = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-euc", f'{exports}\n"$@"', "", *PLAIT, "doctor"],
            capture_output=True,
            text=True,
        )
        assert exported.returncode == 0, exported
        assert "export PLAIT_NATS_MONITOR_URL=http://127.0.0.1:" in banner
        assert (tmp_path / "secret").read_text().strip() not in banner
        process.send_signal(signal.SIGINT)
        rest = await asyncio.to_thread(process.stdout.read)
        assert process.wait(WAIT_S) == 0
        assert rest.splitlines()[-1] == "stopped"
        errors.seek(0)
        assert "EOF" not in errors.read()  # The services have gone before their servers.


async def test_dev_ends_when_its_data_directory_is_gone(tmp_path: Path) -> None:
    with (
        (tmp_path / "errors").open("w+") as errors,
        running(tmp_path / "data", errors=errors) as (process, _),
    ):
        below = descendants(process.pid)
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 1
        assert all(map(gone, below))
        errors.seek(0)
        assert errors.read().splitlines()[-1] == (
            f"plait: the data directory {tmp_path / 'data'} is gone: "
            "what was written since cannot be kept"
        )


async def test_nothing_survives_kill_9_of_dev(tmp_path: Path) -> None:
    with running(tmp_path) as (process, _):
        below = descendants(process.pid)
        process.kill()
    await until_gone(below)


async def test_a_port_or_directory_in_use_is_told_and_starts_nothing(
    stack: Stack, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, said in (
            (["--port", str(port), "--data", str(tmp_path)], f"port {port} is in use"),
            (["--port", "0", "--data", str(stack.data)], "is in use by process"),
        ):
            command = [*PLAIT, "dev", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: ASYNC221
            assert done.returncode == 1
            assert "Traceback" not in done.stderr
            assert done.stderr.splitlines()[-1].startswith("plait: ")
            assert said in done.stderr.splitlines()[-1]
