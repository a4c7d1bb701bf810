"""What a session holds, printed: its list entry, its events, its contexts, its graph."""

import itertools
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.table import Table
from rich.text import Text

from plait.events import ids
from plait.events.errors import UnknownBranch
from plait.services.cli.api import Api, Gateway, LogEvent
from plait.services.cli.draw import Dag, Node, graph
from plait.services.cli.terminal import Terminal, escaped, one_line

SESSIONS = 20
TEXTS = 200  # nodes of a graph whose text is fetched, one request each
SEND = "send_to_branch"
UNTOLD = ("at", "root", "epoch", "worker", "context", "pins")  # told by --json
TIME = "%Y-%m-%d %H:%M:%S"

Json = Annotated[bool, Parameter(negative=())]


def sessions(
    *,
    limit: Annotated[int, Parameter(validator=Number(gte=1))] = SESSIONS,
    json: Json = False,
    gateway: Gateway | None = None,
) -> None:
    """List sessions, newest first.

    Parameters
    ----------
    limit
        How many at most.
    json
        Print JSON.
    """
    with Api(gateway) as api:
        found = list(api.items("/v1/sessions", limit))
    if json:
        return print_json(found)
    if not found:
        return Terminal().print("no sessions yet: begin one with [bold]plait chat[/]")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=len(found[0]["session_id"]))  # to copy it
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in found:
        table.add_row(
            item["session_id"], when(item["created_at"]), Text(one_line(item["title"] or ""))
        )
    return Terminal().print(table)


def log(
    session: str,
    *,
    follow: bool = False,
    full: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
    gateway: Gateway | None = None,
) -> None:
    """Print a session's events, from its first to its last.

    Parameters
    ----------
    session
        The session's id.
    follow
        Go on with new events as they come, until Ctrl-C.
    full
        Print whole ids, as other commands take them, instead of their last eight characters.
    json
        Print one JSON object per line: position, event, data.
    """
    console = Terminal()
    with Api(gateway) as api:
        for event in api.events(session, follow=follow):
            if not event.position:
                continue  # streamed text and deltas are no events of the log
            if json:
                print_json({"position": event.position, "event": event.type, "data": event.data})
            else:
                _print_line(console, _line(event, full=full))


def context(
    session: str, *, head: str | None = None, json: Json = False, gateway: Gateway | None = None
) -> None:
    """Print what the next model call on a branch would see.

    Parameters
    ----------
    session
        The session's id.
    head
        A branch, its name, or a node; the session's HEAD by default.
    json
        Print JSON.
    """
    with Api(gateway) as api:
        if head is not None and ids.of_kind(head, "node") is None:
            head = find_branch(api, session, head)["head_id"]
        answer = api.get(f"/v1/sessions/{session}/context", head=head)
    if json:
        return print_json(answer)
    console = Terminal()
    for message in answer["messages"]:
        console.print(_heard(message), soft_wrap=True)
    return console.print(Text(f"\ndigest {answer['digest']}", "dim"), soft_wrap=True)


def dag(session: str, *, json: Json = False, gateway: Gateway | None = None) -> None:
    """Draw a session's graph: ◇ ROOT, ○ user, △ assistant, ■ tool.

    Parameters
    ----------
    session
        The session's id.
    json
        Print JSON: nodes and lines.
    """
    with Api(gateway) as api:
        if json:
            return print_json(api.get(f"/v1/sessions/{session}/dag"))
        drawing, names, labels = whole_graph(api, session)
    return Terminal().print(graph(drawing, names, labels))


def whole_graph(api: Api, session: str) -> tuple[Dag, dict[str, str], dict[str, str]]:
    """The graph, the branches' names (or what tells them apart), and the nodes' texts."""
    drawing = msgspec.convert(api.get(f"/v1/sessions/{session}/dag"), Dag)
    whole = api.get(f"/v1/sessions/{session}")
    names = {branch["branch_id"]: shown(branch) for branch in whole["branches"]}
    labels = {}
    for node in itertools.islice((n for n in drawing.nodes if n.role != "root"), TEXTS):
        labels[node.id] = said(read_node(api, session, node.id))
    return drawing, names, labels


def read_node(api: Api, session: str, node: str) -> Node:
    return msgspec.convert(api.get(f"/v1/sessions/{session}/nodes/{node}"), Node)


def said(node: Node) -> str:
    """The node's own words; a tool's are what it was called with, and its result."""
    if node.role != "tool":
        return node.text or ""
    return " ⇠ ".join(part for part in (_asked(node), node.text) if part)


def _asked(node: Node) -> str:
    """What a tool was called with. Sending is what branches do most: it gets words of its own."""
    if node.name != SEND:
        return node.args or ""
    try:
        args = msgspec.json.decode(node.args or "", type=dict[str, Any])
        return f"⇢ {args['target_branch']}: {args['message']}"
    except (msgspec.MsgspecError, KeyError):
        return node.args or ""


def find_branch(api: Api, session: str, name: str) -> dict[str, Any]:
    """By name, id, or what stands for its name. Raises UnknownBranch with those that there are."""
    branches: list[dict[str, Any]] = api.get(f"/v1/sessions/{session}")["branches"]
    for branch in branches:
        if name in (branch["name"], branch["branch_id"], shown(branch)):
            return branch
    raise UnknownBranch(name, tuple(map(shown, branches)))


def shown(branch: dict[str, Any]) -> str:
    """A branch's name, or eight characters of its head that tell it apart."""
    name: str = branch["name"] or branch["head_id"][-8:]
    return name


def print_json(value: object) -> None:
    print(escaped(msgspec.json.encode(value).decode()), flush=True)


def _line(event: LogEvent, *, full: bool) -> Text:
    """Place, branch, type, and the fields that say something, ids by their ends or in full."""
    data = dict(event.data)
    place = event.position.partition(".")[2]
    branch = _id(data.pop("branch_id") or "session", full=full)
    line = Text.assemble(
        (f"{place:>7}  ", "dim"), (f"{branch:<8}  ", "cyan"), (f"{event.type:<15} ", "bold")
    )
    for name, value in data.items():
        if value and name not in UNTOLD:
            line.append(f" {name}=", "dim").append(_value(value, full=full))
    return line


def _print_line(console: Terminal, line: Text) -> None:
    if console.is_terminal:
        console.print(line, no_wrap=True, overflow="ellipsis")
    else:
        console.print(line, soft_wrap=True)  # whole, for grep


def _value(value: object, *, full: bool) -> str:
    if isinstance(value, str):
        return _id(value, full=full) if ids.parse(value) else one_line(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item, full=full) for item in value) + "]"
    if isinstance(value, dict):
        items = (f"{name}: {_value(item, full=full)}" for name, item in value.items())
        return "{" + ", ".join(items) + "}"
    return str(value)


def _id(any_id: str, *, full: bool) -> str:
    if full:
        return any_id
    return "ROOT" if any_id.endswith("-root") else ids.short(any_id)


def _heard(message: dict[str, Any]) -> Text:
    """One message as a model gets it."""
    name = message["role"] + (f" {message['name']}" if "name" in message else "")
    text = Text(name, "bold cyan").append("\n")
    if message["content"] is not None:
        text.append(f"{message['content']}\n", "default")
    for call in message.get("tool_calls", ()):
        text.append(f"■ {call['name']} ", "bold default")
        text.append(f"{call['arguments']}\n", "default")
    return text


def when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).astimezone().strftime(TIME)
