"""`make simulate`: many seeds on all processors, mutants, or one seed with its trace."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from tests.simulation.mutants import MUTANTS, Mutant, applied
from tests.simulation.plan import KINDS, Options
from tests.simulation.shrink import command, shrunk
from tests.simulation.world import Result, run

CHUNK = 10  # seeds that a process takes at once
WITHIN = 1_000  # seeds by which each mutant must be found


def main() -> int:
    args = _arguments()
    if args.seed is not None:
        return _one(args)
    if args.mutants is not None:
        return _mutants(args.mutants, args.jobs)
    return _many(args.first, args.seeds, args.seconds, args.jobs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seconds", type=float, help="begin no more seeds after this time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    parser.add_argument("--ops", help="of one seed only these operations: 0,3,4 or none")
    parser.add_argument("--faults", help="of one seed only these faults: turns-0.1@17,… or none")
    parser.add_argument("--without", default="", help=f"no faults of these kinds: {KINDS}")
    parser.add_argument("--in-order", action="store_true", help="processes take turns")
    parser.add_argument("--mutant", help="with one seed: the rule that is taken out")
    parser.add_argument("--mutants", nargs="?", const="", help="all, or those that begin so")
    return parser.parse_args()


def _one(args: argparse.Namespace) -> int:
    options = Options(
        ops=None if args.ops is None else frozenset(map(int, _listed(args.ops))),
        faults=None if args.faults is None else frozenset(_listed(args.faults)),
        without=frozenset(_listed(args.without)),
        in_order=args.in_order,
        trace=True,
    )
    if args.mutant:
        with applied(next(m for m in MUTANTS if m.name == args.mutant)):
            result = run(args.seed, options)
    else:
        result = run(args.seed, options)
    print("\n".join(result.trace))
    print(
        f"seed {args.seed}: {result.appends} appends, {len(result.fired)} faults, "
        f"{result.simulated_s:.1f} simulated seconds; digest {result.digest}"
    )
    return _judged(result)


def _listed(text: str) -> list[str]:
    return [] if text in ("", "none") else text.split(",")


def _judged(result: Result) -> int:
    if result.violation is None:
        print("no invariant is broken")
        return 0
    print(f"BROKEN {result.violation.invariant}: {result.violation.text}")
    return 1


def _many(first: int, count: int, seconds: float | None, jobs: int) -> int:
    began = time.monotonic()
    done = appends = faults = 0
    failed: list[int] = []
    for result in _results(range(first, first + count), jobs, seconds):
        done, appends = done + 1, appends + result.appends
        faults += len(result.fired)
        if result.violation is not None:
            failed.append(result.seed)
            print(f"seed {result.seed} breaks {result.violation.invariant}: ", end="")
            print(result.violation.text, flush=True)
    took = time.monotonic() - began
    print(
        f"{done} seeds in {took:.1f} s ({done / took:.1f}/s on {jobs} processes): "
        f"{appends} appends, {faults} faults, {len(failed)} seeds broke an invariant"
    )
    if not failed:
        return 0
    seed = min(failed)
    print(f"\nseed {seed}, made smaller:\n")
    options, result = shrunk(seed)
    print("\n".join(result.trace))
    _judged(result)
    print(f"\nagain: {command(seed, options)}")
    return 1


def _results(
    seeds: range, jobs: int, seconds: float | None, mutant: Mutant | None = None
) -> Iterator[Result]:
    """In the order of the seeds, as far as the time goes."""
    until = None if seconds is None else time.monotonic() + seconds
    chunks = (seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK))
    with ProcessPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_chunk, c, mutant) for c in islice(chunks, 2 * jobs)]
        try:
            while waiting:
                yield from waiting.pop(0).result()
                if until is None or time.monotonic() < until:
                    waiting += [pool.submit(_chunk, c, mutant) for c in islice(chunks, 1)]
        finally:
            for future in waiting:
                future.cancel()


def _chunk(seeds: range, mutant: Mutant | None) -> list[Result]:
    if mutant is None:
        return [run(seed) for seed in seeds]
    with applied(mutant):
        return [run(seed) for seed in seeds]


def _mutants(beginning: str, jobs: int) -> int:
    missed = 0
    print("| rule | taken out | first seed | invariant |\n|---|---|---|---|")
    for mutant in MUTANTS:
        if not mutant.name.startswith(beginning):
            continue
        found = None
        for result in _results(range(1, WITHIN + 1), jobs, None, mutant):
            if result.violation is not None:
                found = result
                break
        if found is None or found.violation is None:
            missed += 1
            print(f"| {mutant.name} | {mutant.what} | **none of {WITHIN}** | |", flush=True)
        else:
            name = found.violation.invariant
            print(f"| {mutant.name} | {mutant.what} | {found.seed} | `{name}` |", flush=True)
    print(f"\n{missed} mutants were missed")
    return 1 if missed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # The order in a set is no matter of the seed.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
