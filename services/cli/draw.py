"""The graph of a session in the terminal: one row per node in the log's order, a lane per branch.

Pure: the gateway's answers in, rich renderables out. All shapes also work without colour.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from plait.services.cli.terminal import one_line

GLYPHS: Final = {"root": "◇", "user": "○", "assistant": "△", "tool": "■", "attach": "◈"}
LANE_STYLES: Final = ("cyan", "magenta", "green", "yellow", "blue", "red")
LANE = 4  # cells: the branch's own column, a line, its tools, and air
NAME = 12  # cells for a branch's name
ENDS: Final = {"error": "failed", "cancelled": "cancelled", "refused": "refused"}


class Node(Struct, kw_only=True):
    """What is drawn of a node; the gateway's answers hold more."""

    id: str
    branch_id: str
    role: str
    status: str
    seq: int | None = None
    name: str | None = None
    caller: str | None = None
    predecessor: str | None = None
    source: str | None = None
    text: str | None = None
    args: str | None = None


class Line(Struct, kw_only=True):
    kind: str
    node_ids: tuple[str, str]


class Dag(Struct, kw_only=True):
    nodes: list[Node]
    lines: list[Line]


def graph(dag: Dag, names: Mapping[str, str], labels: Mapping[str, str]) -> "Graph":
    """`names` are the branches' names by id; `labels` what stands beside a node, by its id."""
    return Graph(dag, names, labels)


class Graph:
    """Draws itself in the width that there is. What is said stays readable: when the lanes would
    take its place, the last one that fits stands for all beyond it."""

    def __init__(self, dag: Dag, names: Mapping[str, str], labels: Mapping[str, str]) -> None:
        self._dag, self._labels = dag, labels
        branches = {node.branch_id: None for node in dag.nodes if node.role != "root"}
        self._names = {branch: one_line(names.get(branch, "")) for branch in branches}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        longest = max(map(cell_len, self._names.values()), default=0)
        column = min(longest, NAME, max(width // 4, 1))
        most = max((width - column - 2 - width * 2 // 5) // LANE, 1)
        picture = _Picture(self._dag, most)
        for row in picture.rows():
            line = row.text()
            if (node := row.node) is not None:
                name = self._names[node.branch_id] if node.role != "root" else ""
                line.append(f"{set_cell_size(name, column)}  ", _style(picture.lane(node)))
                line.append_text(label(node, self._labels.get(node.id)))
            line.rstrip()
            yield line
        if len(self._names) > most:
            beyond = len(self._names) - most + 1
            yield Text(f"the last lane stands for {beyond} branches", "dim")


def label(node: Node, text: str | None) -> Text:
    """One line about a node: what it says, or what it is when its text is not at hand."""
    line = Text(end="")
    if node.role == "root":
        return line.append("ROOT", "dim")
    if node.role == "tool":
        line.append(one_line(node.name or "tool"), "bold").append(" ")
    if node.source == "from_branch":
        line.append("⇢ ", "bold")
    line.append(one_line(text) if text else f"({node.role})", None if text else "dim")
    if node.status in ENDS:
        line.append(f"  {ENDS[node.status]}", "red")
    elif node.status != "completed":
        line.append(f"  {node.status}…", "dim italic")
    return line


class _Row:
    def __init__(self, width: int, node: Node | None) -> None:
        self.node = node
        self.cells: list[tuple[str, str]] = [(" ", "")] * width

    def put(self, x: int, char: str, style: str) -> None:
        self.cells[x] = (char, style)

    def free(self, x: int) -> bool:
        return self.cells[x][0] == " "

    def text(self) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        for char, style in self.cells:
            line.append(char, style)
        return line


class _Picture:
    """Which lane a branch has, from which row to which, and what crosses it."""

    def __init__(self, dag: Dag, most: int) -> None:
        """At most so many lanes: the last one holds every branch that has none of its own."""
        self._most = most
        # What still waits in an inbox has no place in the log's order yet: it comes last.
        self.nodes = sorted(dag.nodes, key=lambda node: (node.seq is None, node.seq or 0))
        self.row_of = {node.id: row for row, node in enumerate(self.nodes)}
        self.by_id = {node.id: node for node in self.nodes}
        self.lanes: dict[str, int] = {}
        self.first: dict[int, int] = {}  # lane → the row from which its line comes down
        self.last: dict[int, int] = {}
        self.count = 0  # of lanes
        self.forks: dict[int, list[int]] = defaultdict(list)  # row → lanes that fork there
        for row, node in enumerate(self.nodes):
            if node.role != "root":
                self._extend(node, row)
        self.messages = [
            (self.by_id[source], self.by_id[target])
            for source, target in (line.node_ids for line in dag.lines if _is_message(line))
            if source in self.by_id and target in self.by_id
        ]

    def lane(self, node: Node) -> int:
        return 0 if node.role == "root" else self.lanes[node.branch_id]

    @property
    def width(self) -> int:
        return LANE * max(self.count, 1)

    def rows(self) -> Sequence[_Row]:
        rows: list[_Row] = []
        drawn: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            row = _Row(self.width, node)
            self._verticals(row, index)
            self._node(row, index, node)
            drawn[node.id] = len(rows)
            rows.append(row)
            if index in self.forks:
                rows.append(self._fork(index, node))
        for source, target in self.messages:
            self._message(rows, drawn[source.id], drawn[target.id], source, target)
        return rows

    def _extend(self, node: Node, row: int) -> None:
        lane = self.lanes.get(node.branch_id)
        if lane is None:
            parent = self.by_id.get(node.predecessor or "")
            lane = self.lanes[node.branch_id] = min(len(self.lanes), self._most - 1)
            self.count = lane + 1
            start = row if parent is None else self.row_of[parent.id]
            self.first[lane] = min(self.first.get(lane, start), start)
            if parent is not None and self.lane(parent) != lane:
                lanes = self.forks[self.row_of[parent.id]]
                if lane not in lanes:
                    lanes.append(lane)
        self.last[lane] = row

    def _verticals(self, row: _Row, index: int) -> None:
        for lane, first in self.first.items():
            if first < index < self.last[lane]:
                row.put(lane * LANE, "│", _style(lane))

    def _node(self, row: _Row, index: int, node: Node) -> None:
        lane = self.lane(node)
        x, style = lane * LANE, _style(lane)
        glyph = GLYPHS.get(node.role, "?")
        strong = "bold red" if node.status in ENDS else f"bold {style}"
        if node.role != "tool":
            row.put(x, glyph, strong)
            return
        row.put(x, "├" if self.last[lane] > index else "╰", style)
        row.put(x + 1, "─", style)
        row.put(x + 2, glyph, strong)

    def _fork(self, index: int, node: Node) -> _Row:
        row = _Row(self.width, None)
        self._verticals(row, index + 1)
        lane, new = self.lane(node), self.forks[index]
        goes_on = lane in self.last and self.last[lane] > index
        row.put(lane * LANE, "├" if goes_on else "╰", _style(lane))
        for x in range(lane * LANE + 1, max(new) * LANE):
            if row.free(x):
                row.put(x, "─", _style(new[-1]))
        for fork in new:
            passes = self.first[fork] < index  # The last lane can be there for others already.
            end = "┤" if passes else "╮"
            row.put(fork * LANE, end if fork == max(new) else "┬", _style(fork))
        return row

    def _message(
        self, rows: Sequence[_Row], start: int, end: int, source: Node, target: Node
    ) -> None:
        """A dashed line from the calling node down, and across to the message's node."""
        left, right = self.lane(source) * LANE, self.lane(target) * LANE
        if source.role == "tool":
            left += 2
        rightward = left < right
        for row in rows[start + 1 : end]:
            if row.free(left):
                row.put(left, "┊", "dim")
        line = rows[end]
        if line.free(left):
            line.put(left, "╰" if rightward else "╯", "dim")
        for x in range(left + 1, right) if rightward else range(right + 1, left):
            if line.free(x):
                line.put(x, "╌", "dim")
        if left == right:
            return  # Both are in the lane that stands for many.
        beside = right - 1 if rightward else right + 1
        line.put(beside, "▸" if rightward else "◂", "dim")


def _is_message(line: Line) -> bool:
    return line.kind == "communication"


def _style(lane: int) -> str:
    return LANE_STYLES[lane % len(LANE_STYLES)]
