"""What a figure is, and how a run is told: a table for people, JSON for machines."""

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

FILE_WIDTH = 180  # columns, where there is no terminal to tell


class Bar(NamedTuple):
    """What a ratio (or an absolute value, where the design states one) has to keep to."""

    kind: Literal["≥", "≤", "<"]
    value: float
    unit: str = "×"

    def holds(self, value: float) -> bool:
        if self.kind == "≥":
            return value >= self.value
        return value < self.value if self.kind == "<" else value <= self.value

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g} {self.unit}"


class Figure(Struct, frozen=True, kw_only=True):
    """One line of the table. `value` is what the bar is held against, a ratio if not said
    otherwise; `measured` and `baseline` are absolute, so they say nothing across machines."""

    group: str
    what: str
    measured: str
    baseline: str = ""
    value: float | None = None
    bar: Bar | None = None

    @property
    def ok(self) -> bool | None:
        """None: for information only."""
        if self.bar is None or self.value is None:
            return None
        return self.bar.holds(self.value)


class Rounds:
    """Measured and baseline in turns. Each pair gives one ratio, so that a neighbour's load falls
    on both; the figure is the median of the pairs."""

    def __init__(self) -> None:
        self.measured: list[float] = []
        self.baseline: list[float] = []

    def add(self, measured: float, baseline: float) -> None:
        self.measured.append(measured)
        self.baseline.append(baseline)

    @property
    def ratio(self) -> float:
        return median(m / b for m, b in zip(self.measured, self.baseline, strict=True))

    @property
    def medians(self) -> tuple[float, float]:
        return median(self.measured), median(self.baseline)


def rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s"


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def print_table(figures: Sequence[Figure], broken: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("group", "what", "measured", "baseline", "ratio", "bar", ""):
        right = column in ("measured", "baseline", "ratio", "bar")
        table.add_column(column, justify="right" if right else "left")
    for figure in figures:
        verdict = {True: "[green]ok[/]", False: "[red]missed[/]", None: ""}[figure.ok]
        unit = figure.bar.unit if figure.bar else "×"
        table.add_row(
            figure.group,
            figure.what,
            figure.measured,
            figure.baseline,
            "" if figure.value is None else f"{figure.value:.2f} {unit}",
            str(figure.bar or ""),
            verdict,
        )
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)
    for failure in broken:
        console.print(failure, style="red", markup=False)
    missed = [figure for figure in figures if figure.ok is False]
    held = sum(figure.ok is True for figure in figures)
    console.print(f"\n{held} of {held + len(missed)} bars hold.", highlight=False)
    for figure in missed:
        assert figure.bar is not None and figure.value is not None
        console.print(
            f"missed: {figure.group}, {figure.what}: "
            f"{figure.value:.2f} {figure.bar.unit}, the bar is {figure.bar}",
            style="red",
            markup=False,
        )


def print_json(facts: dict[str, str], figures: Sequence[Figure], broken: Sequence[str]) -> None:
    lines = [
        {**msgspec.to_builtins(figure), "bar": str(figure.bar or ""), "ok": figure.ok}
        for figure in figures
    ]
    print(msgspec.json.encode({"machine": facts, "figures": lines, "broken": broken}).decode())
