"""`plait chat`: talk on the branches of a session from the terminal."""

from collections.abc import Callable, Iterator
from typing import Any

from rich.status import Status
from rich.text import Text

from plait.events.errors import PlaitError
from plait.services.cli.api import Api, Gateway, LogEvent
from plait.services.cli.draw import graph
from plait.services.cli.show import find_branch, read_node, said, shown, whole_graph
from plait.services.cli.terminal import Terminal

WAIT_S = 30  # of one `?wait=`; a turn that takes longer is asked for again

HELP = """\
/branches            the session's branches; ● is where you are
/branch NAME         go on on this branch
/fork NODE TEXT      go on from an earlier node, on a new branch
/checkout NODE       move the session's HEAD there
/name NAME           name the branch you are on
/send BRANCH TEXT    ask another branch, and wait for its reply
/dag                 draw the session
/quit                leave (or Ctrl-D); the session stays"""


def chat(
    session: str | None = None, *, model: str | None = None, gateway: Gateway | None = None
) -> None:
    """Talk on a session's branches.

    Parameters
    ----------
    session
        An existing session; a new one by default.
    model
        The new session's model, `provider:model`; the server's default without.
    """
    with Api(gateway) as api:
        _Chat(api, session or api.post("/v1/sessions", {"model": model})["session_id"]).run()


class _Chat:
    def __init__(self, api: Api, session: str) -> None:
        self.api, self.session = api, session
        self.path = f"/v1/sessions/{session}"
        self.branch: str | None = None  # None: the session's HEAD
        self.console = Terminal()
        self.prompt = Text("> " if self.console.is_terminal else "", "bold cyan")
        self.commands: dict[str, Callable[[str], None]] = {
            "/branches": self.branches,
            "/branch": self.go_to,
            "/fork": self.fork,
            "/checkout": self.checkout,
            "/name": self.name,
            "/send": self.send,
            "/dag": self.dag,
            "/help": lambda _: self.console.print(Text(HELP, "dim")),
        }

    def run(self) -> None:
        self.api.get(self.path)  # An unknown session is said before the first prompt.
        self.console.print(f"session [bold]{self.session}[/]   [dim]/help lists the commands[/]\n")
        while True:
            try:
                line = self.console.input(self.prompt).strip()
            except (EOFError, KeyboardInterrupt):
                return self.console.print()
            if line == "/quit":
                return None
            try:
                self.answer(line)
            except PlaitError as error:
                self.console.print(Text(str(error), "red"))
            except KeyboardInterrupt:
                self.console.print(Text("\nstopped waiting; the turn goes on", "dim"))

    def answer(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if command := self.commands.get(word):
            command(rest.strip())
        elif line.startswith("/"):
            self.console.print(Text(f"{word} is no command; /help lists them", "red"))
        elif line:
            self.post({"text": line, "branch": self.branch})

    def post(self, body: dict[str, object]) -> None:
        given = {name: value for name, value in body.items() if value is not None}
        with self.api.live(self.session) as events, self.console.status("") as status:
            posted = self.api.post(f"{self.path}/messages", given)
            self.branch = posted["branch_id"]
            said = self.listen(posted["turn_id"], events, status)
        while True:
            turn = self.api.get(f"/v1/turns/{posted['turn_id']}", wait=WAIT_S)
            if turn["status"] in ("completed", "error", "cancelled"):
                break
        self.show_turn(turn, said)

    def listen(self, turn: str, events: Iterator[LogEvent], status: Status) -> str:
        """Prints what the turn's model says while it says it, to the turn's end. Returns the text
        of its last step."""
        step, text = 0, ""
        for event in events:
            if event.data.get("turn_id") != turn:
                continue
            if event.type == "TurnEnded":
                break
            if event.type != "token":
                continue
            status.stop()
            piece = event.data
            if text and (piece["restarted"] or piece["step"] != step):
                self.console.print(Text(" …" if piece["restarted"] else "", "dim"))
                text = ""
            if piece["text"]:
                if not text:
                    self.console.print(Text("△ ", "bold cyan"), end="")
                self.console.print(Text(piece["text"]), end="", soft_wrap=True)
            step, text = piece["step"], text + piece["text"]
        if text:
            self.console.print()
        return text

    def show_turn(self, turn: dict[str, Any], heard: str) -> None:
        """`heard` is what has been printed of it already."""
        for step in turn["steps"]:
            for call in step["calls"]:
                node = read_node(self.api, self.session, call)
                self.console.print(Text(f"■ {node.name} ", "bold").append(said(node), "dim"))
        if turn["status"] == "completed":
            if not heard or heard != turn["text"]:
                self.console.print(Text("△ ", "bold cyan").append(turn["text"] or "", "default"))
        else:
            why = (turn["error"] or {}).get("message", "")
            self.console.print(Text(f"△ {turn['status']}: {why}", "red"))
        self.console.print(Text(f"  {turn['node_id']}", "dim"))

    def branches(self, _: str) -> None:
        whole = self.api.get(self.path)
        here = self.branch or whole["head_branch_id"]
        for branch in whole["branches"]:
            mark = "●" if branch["branch_id"] == here else " "
            busy = "busy" if branch["busy"] else branch["status"]
            line = Text(f"{mark} {shown(branch):<12} ", "bold")
            self.console.print(line.append(f"{busy:<8} head {branch['head_id']}", "dim"))

    def go_to(self, name: str) -> None:
        self.branch = find_branch(self.api, self.session, name)["branch_id"]

    def fork(self, rest: str) -> None:
        node, _, text = rest.partition(" ")
        if not text:
            return self.console.print(Text("/fork NODE TEXT", "red"))
        return self.post({"text": text, "after": node})

    def checkout(self, node: str) -> None:
        head = self.api.post(f"{self.path}/checkout", {"node_id": node})
        self.branch = None
        self.console.print(Text(f"HEAD is at {head['head_id']}", "dim"))

    def name(self, name: str) -> None:
        branch = self.branch or self.api.get(self.path)["head_branch_id"]
        self.api.patch(f"{self.path}/branches/{branch}", {"name": name})

    def send(self, rest: str) -> None:
        target, _, text = rest.partition(" ")
        if not text:
            return self.console.print(Text("/send BRANCH TEXT", "red"))
        body: dict[str, object] = {"target_branch": target, "message": text, "wait_reply": True}
        if self.branch is not None:
            body["from"] = self.branch
        with self.console.status(Text(f"waiting for {target}")):
            message = self.api.post(f"{self.path}/send", body, wait=WAIT_S)
        reply = message.get("reply")
        if reply is None:
            text = f"no reply yet; ask for it: /v1/messages/{message['message_id']}"
            return self.console.print(Text(text, "dim"))
        return self.console.print(Text(f"⇠ {target}: ", "bold").append(reply["text"], "default"))

    def dag(self, _: str) -> None:
        self.console.print(graph(*whole_graph(self.api, self.session)))
