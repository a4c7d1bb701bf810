"""The command line without a server: what it draws, what it says, how it exits."""

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from rich.console import Console

from plait.events.errors import Unavailable
from plait.services.cli.api import Api, Gateway, Refused
from plait.services.cli.draw import Dag, Line, Node, graph
from plait.services.cli.main import app
from plait.services.cli.show import sessions

COMMANDS = (
    *("dev", "demo", "gateway", "turns", "replies", "projections"),
    *("chat", "sessions", "log", "context", "dag", "provider"),
    *("rebuild", "doctor"),
)


def node(
    name: str,
    role: str,
    seq: int | None,
    *,
    after: str | None = None,
    caller: str | None = None,
    source: str | None = None,
    status: str = "completed",
) -> Node:
    """`name` is branch and number, such as A1."""
    return Node(
        id=name,
        branch_id=name[0],
        role=role,
        status=status,
        seq=seq,
        predecessor=after,
        caller=caller,
        source=source,
        name="send_to_branch" if role == "tool" else None,
    )


ASKED = Dag(
    nodes=[
        node("_", "root", 0),
        node("A1", "user", 1, after="_"),
        node("A2", "assistant", 2, after="A1"),
        node("B1", "user", 3, after="_"),
        node("A3", "user", 4, after="A2"),
        node("A4", "assistant", 5, after="A3"),
        node("A5", "tool", 6, caller="A4"),
        node("B2", "user", 7, after="B1", source="from_branch"),
        node("B3", "assistant", 8, after="B2"),
        node("C1", "user", 9, after="A2"),
        node("C2", "assistant", 10, after="C1", status="error"),
        node("A6", "user", None, source="from_branch", status="pending"),
    ],
    lines=[
        Line(kind="communication", node_ids=("A5", "B2")),
        Line(kind="communication", node_ids=("C2", "A6")),
    ],
)


def drawn(dag: Dag, width: int = 80, **labels: str) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(
        graph(dag, {"A": "writer", "B": "research", "C": "fork"}, labels)
    )
    return out.getvalue()


def test_a_graph_has_a_lane_per_branch_and_shows_who_asked_whom() -> None:
    assert drawn(ASKED, A3="ask research:\nhow long?", B2="how long?") == (
        "◇                     ROOT\n"
        "├───╮\n"
        "○   │       writer    (user)\n"
        "△   │       writer    (assistant)\n"
        "├───│───╮\n"
        "│   ○   │   research  (user)\n"
        "○   │   │   writer    ask research: how long?\n"
        "△   │   │   writer    (assistant)\n"
        "├─■ │   │   writer    send_to_branch (tool)\n"
        "│ ╰▸○   │   research  ⇢ how long?\n"
        "│   △   │   research  (assistant)\n"
        "│       ○   fork      (user)\n"
        "│       △   fork      (assistant)  failed\n"
        "○◂╌╌╌╌╌╌╯   writer    ⇢ (user)  pending…\n"
    )


def test_a_long_text_ends_in_an_ellipsis_in_a_narrow_terminal() -> None:
    lines = drawn(ASKED, width=40, A1="word " * 100).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[2].endswith("…")


def test_a_session_without_messages_is_its_root() -> None:
    assert drawn(Dag(nodes=[node("_", "root", 0)], lines=[])) == "◇     ROOT\n"


# -- talking to a gateway --------------------------------------------------------------------


class Canned(BaseHTTPRequestHandler):
    """Answers by path with what a gateway would say."""

    answers: ClassVar[dict[str, tuple[int, str, str]]] = {
        "/v1/sessions/s1": (
            404,
            "application/problem+json",
            '{"title": "Not found", "detail": "there is no session s1", "code": "unknown_session"}',
        ),
        "/v1/sessions?page_size=3": (
            200,
            "application/json",
            '{"items": [1, 2], "next_page_token": "more"}',
        ),
        "/v1/sessions?page_size=1&page_token=more": (
            200,
            "application/json",
            '{"items": [3], "next_page_token": "yet more"}',
        ),
        "/v1/sessions/s2/events?from=start": (
            200,
            "text/event-stream",
            (
                ": alive\n\n"
                'id: 1.2.0\nevent: TurnEnded\ndata: {"status":\ndata: "completed"}\n\n'
                'event: token\ndata: {"text": "a"}\n\n'
                ": caught up\n\n"
                "id: 1.3.0\nevent: TurnEnded\ndata: {}\n\n"
            ),
        ),
    }

    def do_GET(self) -> None:
        status, kind, body = self.answers.get(self.path, (502, "text/html", "<h1>Bad Gateway</h1>"))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with HTTPServer(("127.0.0.1", 0), Canned) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Gateway(f"http://127.0.0.1:{server.server_port}", "key")
        server.shutdown()
        thread.join()


def test_a_list_is_read_page_after_page_up_to_its_limit(gateway: Gateway) -> None:
    with Api(gateway) as api:
        assert list(api.items("/v1/sessions", 3)) == [1, 2, 3]


def test_events_carry_their_position_and_streamed_text_has_none(gateway: Gateway) -> None:
    past = [("1.2.0", "TurnEnded", {"status": "completed"}), ("", "token", {"text": "a"})]
    with Api(gateway) as api:
        assert list(api.events("s2", follow=False)) == past
        assert list(api.events("s2", follow=True)) == [*past, ("1.3.0", "TurnEnded", {})]


def test_a_problem_is_told_by_its_detail_and_code(gateway: Gateway) -> None:
    with Api(gateway) as api, pytest.raises(Refused, match=r"no session s1 \(unknown_session\)"):
        api.get("/v1/sessions/s1")


def test_an_answer_that_is_no_problem_is_told_by_its_status(gateway: Gateway) -> None:
    with Api(gateway) as api, pytest.raises(Refused, match="Bad Gateway"):
        api.get("/elsewhere")


def test_a_gateway_that_is_not_there_is_told_with_how_to_start_it() -> None:
    with Api(Gateway("http://127.0.0.1:1")) as api, pytest.raises(Unavailable, match="`plait dev`"):
        api.get("/v1/sessions")


# -- as a process ----------------------------------------------------------------------------


def plait(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "plait.services.cli.main", *arguments]
    env = {"COLUMNS": "100", "PLAIT_URL": "http://127.0.0.1:1", "PLAIT_NATS_URL": "nats://[bad"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_help_lists_every_command() -> None:
    shown = plait("--help")
    assert shown.returncode == 0
    for command in COMMANDS:
        assert f"│ {command} " in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app([command, "--help"])
    assert f"Usage: plait {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("sesions",), ("dev", "--prot", "1"), ("dag",)])
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str, ...]) -> None:
    shown = plait(*arguments)
    assert shown.returncode == 2
    assert "Traceback" not in shown.stderr + shown.stdout


@pytest.mark.parametrize("arguments", [("sessions",), ("sessions", "--json"), ("chat",)])
def test_a_failed_operation_exits_with_1_and_one_line(arguments: tuple[str, ...]) -> None:
    shown = plait(*arguments)
    assert shown.returncode == 1
    assert shown.stdout == ""
    assert shown.stderr == (
        "plait: cannot reach http://127.0.0.1:1: start it with `plait dev`, or set PLAIT_URL\n"
    )


def test_help_does_not_load_what_the_commands_need() -> None:
    script = (
        "import sys; from plait.services.cli.main import app; app('--help', exit_on_error=False);"
        "print([m for m in ('httpx', 'nats', 'redis', 'litestar') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert shown.stdout.endswith("[]\n"), shown


def test_json_is_one_line(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    sessions(limit=3, json=True, gateway=gateway)
    assert json.loads(capsys.readouterr().out) == [1, 2, 3]
