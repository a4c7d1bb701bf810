"""`plait demo`: one branch asks another and uses its answer, on real servers, and is checked."""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from msgspec import Struct
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from plait.events import ids
from plait.events.errors import Final
from plait.events.ids import message_of
from plait.services.cli.api import Api, Gateway
from plait.services.cli.draw import GLYPHS, Node, graph, label
from plait.services.cli.logs import log_to_stderr
from plait.services.cli.show import print_json, read_node, whole_graph
from plait.services.cli.terminal import Terminal
from plait.services.dev.stack import SERVICES, Stack

MODEL = "offline:demo"
BRIEF = "You write about the sea. Ask the branch `research` for what you do not know."
NOTES = "A nautical mile is 1852 metres."
QUESTION = "How long is a nautical mile?"
WAIT_S = 20.0  # for each turn: the whole demo takes a few seconds
RECEIPTS = ("accepted", "delivered", "consumed", "replied")


class DemoFailed(Final):
    """The result is not what it must be."""


class Story(Struct):
    """What happened, as the gateway tells it."""

    session: str
    branches: dict[str, str]  # name → id
    turn: dict[str, Any]
    message: dict[str, Any]
    took_s: float


def demo(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """See one branch ask another, end to end; needs no key and no network.

    Starts everything in a temporary directory, lets the branch `writer` ask the branch
    `research`, shows what each of them saw, and exits with 0 only if the answer arrived.

    Parameters
    ----------
    json
        Print one line of JSON: ok, session_id, question, reply, answer, receipts, took_s.
    """
    log_to_stderr("warning", process="demo")
    return asyncio.run(_demo(json=json))


async def _demo(*, json: bool) -> int:
    console = Terminal(quiet=json)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plait-demo-") as directory:
        status = console.status("starting NATS, Valkey and four services …")
        status.start()
        async with Stack(Path(directory), model=MODEL) as stack:
            status.stop()
            _done(console, f"NATS, Valkey and {len(SERVICES)} services are up", since=began)
            with Api(Gateway(stack.url, stack.key)) as api:
                story = await asyncio.to_thread(_play, api, console)
                await asyncio.to_thread(_show, api, console, story)
                answer = await asyncio.to_thread(_check, api, story)
    if json:
        print_json({"ok": True, **answer})
    else:
        _done(console, "the answer arrived: asked, delivered, read, answered, quoted", since=began)
    return 0


def _play(api: Api, console: Terminal) -> Story:
    """Two branches side by side from ROOT; then one asks the other."""
    began = time.monotonic()
    session = api.post("/v1/sessions", {"title": "demo", "model": MODEL})["session_id"]
    messages = f"/v1/sessions/{session}/messages"
    branches = {}
    for name, text in (("writer", BRIEF), ("research", NOTES)):
        posted = api.post(messages, {"text": text, "after": ids.root_id(session)})
        branches[name] = posted["branch_id"]
        api.patch(f"/v1/sessions/{session}/branches/{posted['branch_id']}", {"name": name})
        _ended(api, posted["turn_id"])
    _done(console, "the branches writer and research have been told what they are for", began)
    asked = time.monotonic()
    posted = api.post(messages, {"text": f"ask research: {QUESTION}", "branch": "writer"})
    turn = _ended(api, posted["turn_id"])
    took_s = time.monotonic() - asked
    _done(console, "writer has asked research, waited for its reply, and answered", asked)
    if not turn["waits"]:
        raise DemoFailed(f"writer asked nobody; it said: {turn['text']!r}")
    message = api.get(f"/v1/messages/{message_of(turn['waits'][0]['wait_id'])}")
    return Story(session, branches, turn, message, took_s)


def _ended(api: Api, turn_id: str) -> dict[str, Any]:
    turn: dict[str, Any] = api.get(f"/v1/turns/{turn_id}", wait=WAIT_S)
    if turn["status"] != "completed":
        why = (turn["error"] or {}).get("message", f"not ended within {WAIT_S:.0f} s")
        raise DemoFailed(f"turn {turn_id} is {turn['status']}: {why}")
    return turn


def _check(api: Api, story: Story) -> dict[str, Any]:
    """Raises DemoFailed unless the reply is research's own text, was receipted at every stage,
    and stands in what writer answered."""
    reply = story.message["reply"]
    if reply is None:
        raise DemoFailed("research's reply is not on the message")
    node = read_node(api, story.session, reply["node_id"])
    kinds = [receipt["kind"] for receipt in story.message["receipts"]]
    answer = story.turn["text"] or ""
    for right, wrong in (
        (node.branch_id == story.branches["research"], "the reply is not by research"),
        (reply["text"] and node.text == reply["text"], "the reply is not what research said"),
        (kinds == list(RECEIPTS), f"the receipts are {', '.join(kinds)}"),
        (reply["text"] in answer, f"writer did not use the reply {reply['text']!r}: {answer!r}"),
    ):
        if not right:
            raise DemoFailed(wrong)
    return {
        "session_id": story.session,
        "question": story.message["text"],
        "reply": reply["text"],
        "answer": answer,
        "receipts": kinds,
        "took_s": round(story.took_s, 3),
    }


# -- what it looks like ----------------------------------------------------------------------


def _done(console: Terminal, text: str, since: float) -> None:
    line = Text("✓ ", "bold green").append(text, "default")
    console.print(line.append(f"  {time.monotonic() - since:.1f} s", "dim"))


def _show(api: Api, console: Terminal, story: Story) -> None:
    drawing, names, labels = whole_graph(api, story.session)
    for name, branch in story.branches.items():
        _heading(console, name)
        for node in _in_order_of_speech(drawing.nodes, branch):
            console.print(_spoken(node, labels.get(node.id, "")))
    _heading(console, "the message, from writer to research and back")
    console.print(_receipts(story.message["receipts"]))
    _heading(console, "the graph")
    console.print(graph(drawing, names, labels))
    console.print(
        Text("\n◇ ROOT  ○ user  △ assistant  ■ tool  ┊╰▸ a message to another branch\n", "dim")
    )


def _heading(console: Terminal, title: str) -> None:
    console.print()
    console.print(Rule(Text(title, "bold"), align="left", style="dim"))


def _in_order_of_speech(nodes: Sequence[Node], branch: str) -> Iterator[Node]:
    """A turn's node is there before its tools; its text is said after them."""
    nodes = sorted(nodes, key=lambda node: node.seq or 0)
    for node in nodes:
        if node.branch_id == branch and node.role != "tool":
            yield from (tool for tool in nodes if tool.caller == node.id)
            yield node


def _spoken(node: Node, text: str) -> Table:
    """One node in full: its mark, and its text wrapped beside it."""
    line = Table.grid(padding=(0, 1))
    line.add_column(width=1)
    line.add_column()
    line.add_row(Text(GLYPHS[node.role], "bold"), label(node, text))
    return line


def _receipts(receipts: Sequence[dict[str, Any]]) -> Text:
    """When the message passed each stage, in ms after it was accepted."""
    line = Text()
    for receipt in receipts:
        if line:
            line.append(" ─ ", "dim")
        line.append(receipt["kind"], "bold green" if receipt["kind"] == "replied" else "bold")
        line.append(f" +{receipt['at'] - receipts[0]['at']} ms", "dim")
    return line
