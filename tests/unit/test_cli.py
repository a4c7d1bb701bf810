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

from plait.events.errors import Misconfigured, Unavailable
from plait.events.settings import without_password
from plait.services.cli.api import Api, Gateway, Refused
from plait.services.cli.draw import Dag, Line, Node, graph
from plait.services.cli.main import app
from plait.services.cli.show import context, log, sessions
from plait.services.cli.terminal import one_line, plain

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


def test_more_lanes_than_fit_share_the_last_one_and_the_text_stays() -> None:
    nodes = [node("_", "root", 0)]
    for number in range(30):
        user = Node(
            id=f"u{number}", branch_id=f"b{number}", role="user", status="completed", seq=number + 1
        )
        nodes.append(user)
    ask = Line(kind="communication", node_ids=("u28", "u29"))
    out = io.StringIO()
    names = {f"b{number}": f"branch-{number}" for number in range(30)}
    labels = {f"u{number}": f"it says {number}, and goes on and on" for number in range(30)}
    Console(file=out, width=80).print(graph(Dag(nodes=nodes, lines=[ask]), names, labels))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("○ ")
    assert lines[-2].endswith("○   branch-29  it says 29, and goes on and on")
    assert lines[-1] == "the last lane stands for 22 branches"


def test_a_session_without_messages_is_its_root() -> None:
    assert drawn(Dag(nodes=[node("_", "root", 0)], lines=[])) == "◇     ROOT\n"


# -- talking to a gateway --------------------------------------------------------------------


EVIL = "a\n\r\x1b[31mb\x07\x9b1m\u202ec\u2066\x7f"


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
        "/v1/sessions?page_size=2": (
            200,
            "application/json",
            json.dumps(
                {
                    "items": [{"session_id": "s1", "created_at": 0, "title": EVIL}],
                    "next_page_token": None,
                }
            ),
        ),
        "/v1/sessions/s3/events?from=start": (
            200,
            "text/event-stream",
            "id: 1.2.0\nevent: X\ndata: "
            + json.dumps({"branch_id": "s234567234567-b22222222", "text": EVIL})
            + "\n\n: caught up\n\n",
        ),
        "/v1/sessions/s3/context": (
            200,
            "application/json",
            json.dumps({"messages": [{"role": "user", "content": EVIL}], "digest": "d"}),
        ),
        "/v1/sessions/evil": (404, "application/problem+json", json.dumps({"detail": EVIL})),
        "/v1/sessions?page_size=4": (200, "text/html", "<h1>some other server</h1>"),
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


def test_an_answer_of_another_server_is_told(gateway: Gateway) -> None:
    with Api(gateway) as api, pytest.raises(Unavailable, match="not answer as a gateway of Plait"):
        list(api.items("/v1/sessions", 4))


def test_an_id_cannot_become_a_query(gateway: Gateway) -> None:
    with Api(gateway) as api, pytest.raises(Refused, match="Bad Gateway"):
        api.get("/v1/sessions?page_size=3")


@pytest.mark.parametrize("url", ["foo", "http://", "http://[", "http://h:99999", "ftp://h", ""])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(Misconfigured, match=r"PLAIT_URL=.* is no address"):
        Api(Gateway(url, "key"))


@pytest.mark.parametrize("key", ["ü", "a\nb", "", "a b"])
def test_a_key_that_is_none_is_told_without_showing_it(key: str) -> None:
    with pytest.raises(Misconfigured, match="PLAIT_KEY is no key: a key is of"):
        Api(Gateway("http://127.0.0.1:1", key))


# -- other people's text ---------------------------------------------------------------------


@pytest.mark.parametrize("show", ["sessions", "log", "context", "sessions --json", "log --json"])
def test_what_others_wrote_cannot_steer_the_terminal(
    show: str, gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    as_json = show.endswith("--json")
    if show.startswith("sessions"):
        sessions(limit=2, json=as_json, gateway=gateway)
    elif show.startswith("log"):
        log("s3", json=as_json, gateway=gateway)
    else:
        context("s3", gateway=gateway)
    shown = capsys.readouterr().out
    assert shown == plain(shown)
    assert "[31mb" in shown
    if show in ("sessions", "log"):
        assert shown.count("\n") == 1
    if as_json:
        assert EVIL in _strings(json.loads(shown))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def test_control_characters_are_shown_and_lines_stay_where_they_may() -> None:
    assert plain(EVIL) == "a\n␍␛[31mb␇�1m�c�␡"
    assert one_line("a\n\r\tb\x85c") == "a b c"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://user:p@ss/w,rd@host:4222", "nats://***@host:4222"),
        ("nats://token@host", "nats://***@host"),
        ("user:secret@host:4222", "***@host:4222"),
        ("redis://:secret@host:6379/0", "redis://***@host:6379/0"),
        ("redis://host/0?password=secret&db=1", "redis://host/0?password=***&db=1"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_no_password_of_several_addresses_is_shown() -> None:
    shown = without_password("nats://a:secret@one:4222,nats://b:secret@two:4222")
    assert "secret" not in shown
    assert shown.endswith("@two:4222")


# -- as a process ----------------------------------------------------------------------------


def plait(*arguments: str | bytes, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "plait.services.cli.main", *arguments]
    env = {
        "COLUMNS": "100",
        "PLAIT_URL": "http://127.0.0.1:1",
        "PLAIT_NATS_URL": "nats://u:hunter2@[bad",
        "PLAIT_REDIS_URL": "redis://u:hunter2@127.0.0.1:1/0",
        **env,
    }
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("sesions",),
        (b"\xff",),
        ("dag",),
        ("dev", "--prot", "1"),
        ("dev", "--port", "99999"),
        ("dev", "--port", "-1"),
        ("sessions", "--limit", "0"),
        ("sessions", "--limit", "-3"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str | bytes, ...]) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (("sessions",), {"PLAIT_KEY": "ü"}, "PLAIT_KEY is no key"),
        (("sessions",), {"PLAIT_KEY": "a\nb"}, "PLAIT_KEY is no key"),
        (("sessions",), {"PLAIT_URL": "foo"}, "PLAIT_URL='foo' is no address"),
        (("dag", b"\xff"), {}, "cannot reach"),
        (("chat", "--model", b"\xff"), {}, "cannot reach"),
        (("sessions",), {"PLAIT_URL": "http://u:hunter2@127.0.0.1:1"}, "http://***@127.0.0.1:1"),
        (("rebuild",), {}, "no NATS at nats://***@[bad"),
        (("rebuild",), {"PLAIT_REDIS_URL": "foo"}, "PLAIT_REDIS_URL='foo'"),
        (("dev", "--data", __file__), {}, "Not a directory"),
        (("dev", "--data", "/nowhere"), {"PLAIT_HOST": "300.1.1.1"}, "'300.1.1.1' is no address"),
    ],
)
def test_what_cannot_be_done_is_told_without_a_traceback(
    arguments: tuple[str | bytes, ...], env: dict[str, str], said: str
) -> None:
    shown = plait(*arguments, **env)
    assert shown.returncode == 1
    assert "Traceback" not in shown.stderr + shown.stdout
    assert "hunter2" not in shown.stderr + shown.stdout
    assert shown.stderr.startswith("plait: ")
    assert said in shown.stderr


@pytest.mark.parametrize("env", [{}, {"PLAIT_REDIS_URL": "foo"}])
def test_doctor_shows_no_password_and_tells_of_a_setting_that_is_wrong(env: dict[str, str]) -> None:
    shown = plait("doctor", **env)
    assert shown.returncode == 1
    assert "Traceback" not in shown.stderr + shown.stdout
    assert "hunter2" not in shown.stderr + shown.stdout
    assert "✗" in shown.stdout


def test_a_terminal_without_unicode_gets_shapes_that_it_can_show() -> None:
    shown = plait("doctor", PYTHONIOENCODING="ascii")
    assert "Traceback" not in shown.stderr
    assert "+ plait" in shown.stdout
    assert "x NATS" in shown.stdout


def test_the_narrowest_terminal_still_shows_something() -> None:
    assert "plait" in plait("doctor", COLUMNS="1").stdout


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
