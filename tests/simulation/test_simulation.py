"""A fixed budget of seeds, the rules that were taken out, and the simulation itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, applied
from tests.simulation.plan import Options
from tests.simulation.shrink import command, shrunk
from tests.simulation.world import run

HERE = Path(__file__).parent
SEEDS = 1_200
BUDGET_S = 60  # after which no more seeds are begun
OFTEN = 200  # rules that are missed within so many seeds are tried in each run of the tests
_ROW = re.compile(r"\| (P\w+) \|[^|]*\| (\d+) \|")
TABLE = {name: int(seed) for name, seed in _ROW.findall((HERE / "README.md").read_text())}


def simulate(*arguments: str, hash_seed: str = "0") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(400)
def test_no_seed_breaks_an_invariant() -> None:
    ran = simulate("--seeds", str(SEEDS), "--seconds", str(BUDGET_S))
    print(ran.stdout[-20_000:])
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]


def test_each_rule_has_its_row_in_the_table() -> None:
    assert list(TABLE) == [mutant.name for mutant in MUTANTS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if TABLE[m.name] <= OFTEN], ids=lambda mutant: mutant.name
)
def test_a_rule_is_missed_when_it_is_taken_out(mutant: Mutant) -> None:
    with applied(mutant):
        seeds = [TABLE[mutant.name], *range(1, OFTEN)]
        found = any(run(seed).violation is not None for seed in seeds)
    assert found, "run `make simulate MUTANTS=1`: the seeds in the table are of an older workload"


def test_a_seed_gives_the_same_run_whatever_the_order_in_sets() -> None:
    """All that happens; not the loop's steps: in which order the tasks of a dead process end is
    told by their addresses, and has no effect."""
    lines = []
    for hash_seed in ("0", "1"):
        code = (
            "from tests.simulation.world import run\n"
            "print([(r.digest, r.appends, r.fired, r.trace) for r in map(run, range(1, 25))])"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=HERE.parent.parent,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        lines.append(ran.stdout)
    assert lines[0] == lines[1]


def test_a_failing_seed_is_made_smaller_and_its_command_runs_it_again() -> None:
    mutant = next(m for m in MUTANTS if m.name == "P9b")
    with applied(mutant):
        whole = run(TABLE["P9b"])
        options, result = shrunk(TABLE["P9b"])
    assert whole.violation is not None and result.violation is not None
    assert result.violation.invariant == whole.violation.invariant
    assert len(result.ops) + len(result.fired) < len(whole.ops) + len(whole.fired)
    words = re.findall(
        r"make simulate SEED=(\d+)(?: ARGS=\"(.*)\")?", command(result.seed, options)
    )
    (seed, arguments), *_ = words
    again = simulate("--seed", seed, "--mutant", "P9b", *arguments.split())
    assert again.returncode == 1
    assert f"BROKEN {result.violation.invariant}" in again.stdout
    assert "append #1 " in again.stdout


def test_a_run_without_faults_and_with_them_comes_to_rest() -> None:
    seed = next(seed for seed in range(1, 50) if len(run(seed).fired) > 20)
    calm = run(seed, Options(faults=frozenset()))
    assert calm.violation is None
    assert calm.fired == ()
    assert calm.appends > 0
