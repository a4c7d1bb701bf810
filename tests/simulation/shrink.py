"""Makes a failing seed smaller: fewer operations, fewer faults, a simpler schedule.

A smaller run counts when it breaks the same invariant. Leaving something out changes what comes
after it, so this is a search within a bound, not a proof that nothing smaller fails.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from tests.simulation.plan import Options
from tests.simulation.world import Result, run

RUNS = 400


def shrunk(seed: int) -> tuple[Options, Result]:
    """The options of the smallest run that was found, and that run with its trace."""
    return _Search(seed).run()


def command(seed: int, options: Options) -> str:
    """The one line that runs it again."""
    words = [f"make simulate SEED={seed}"]
    args = []
    if options.ops is not None:
        args.append(f"--ops {','.join(map(str, sorted(options.ops))) or 'none'}")
    if options.faults is not None:
        args.append(f"--faults {','.join(sorted(options.faults)) or 'none'}")
    if options.in_order:
        args.append("--in-order")
    return " ".join([*words, f'ARGS="{" ".join(args)}"'] if args else words)


class _Search:
    def __init__(self, seed: int) -> None:
        self.seed, self.left = seed, RUNS
        self.best, self.result = Options(), run(seed)
        assert self.result.violation is not None, f"seed {seed} breaks nothing"
        self.invariant = self.result.violation.invariant

    def run(self) -> tuple[Options, Result]:
        self._try(replace(self.best, in_order=True))
        self._try(replace(self.best, faults=frozenset()))
        for _ in range(2):
            self._fewer(self.result.ops, lambda kept: replace(self.best, ops=frozenset(kept)))
            self._fewer(self.result.fired, lambda kept: replace(self.best, faults=frozenset(kept)))
        self._try(replace(self.best, in_order=True))
        return self.best, run(self.seed, replace(self.best, trace=True))

    def _try(self, options: Options) -> bool:
        if not self.left:
            return False
        self.left -= 1
        result = run(self.seed, options)
        if result.violation is None or result.violation.invariant != self.invariant:
            return False
        self.best, self.result = options, result
        return True

    def _fewer(self, items: Sequence[Any], options: Callable[[Sequence[Any]], Options]) -> None:
        """Leaves out halves, then quarters, …, then single items, as long as it still fails."""
        kept, size = [*items], max(1, len(items) // 2)
        while kept and self.left:
            at, smaller = 0, False
            while at < len(kept):
                fewer = kept[:at] + kept[at + size :]
                if self._try(options(fewer)):
                    kept, smaller = fewer, True
                else:
                    at += size
            if size == 1 and not smaller:
                return
            size = max(1, size // 2)
