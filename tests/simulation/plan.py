"""What a seed decides before anything runs: how large the world is, and what goes wrong in it.

Every seed switches each kind of fault on or off by itself, so that some runs have one fault
often and others a few of all.
"""

import random
from collections.abc import Mapping

from msgspec import Struct

from plait.events.limits import Limits
from plait.events.settings import Settings

# What can happen at a call over a wire, and how often at most.
FAULTS: Mapping[str, float] = {
    "slow": 0.05,  # takes seconds
    "refused": 0.03,  # does not get there
    "lost": 0.04,  # gets there; its answer does not come back
    "late": 0.03,  # gets there after the caller has given up
    "kill": 0.015,  # the process dies before it gets there
    "kill_after": 0.02,  # the process dies after it got there
    "freeze": 0.01,  # the process stands still for seconds
    "cut": 0.006,  # the process is cut off from all servers for seconds
}
# What happens by itself.
EVENTS = ("lease", "queue", "again", "flush", "http")
KINDS = (*FAULTS, *EVENTS)

KILLS = 8  # of one run: above that nothing gets done
OPS = {
    "post": 46,
    "send": 14,
    "checkout": 5,
    "name": 7,
    "archive": 6,
    "restore": 4,
    "stop": 8,
    "cancel": 6,
    "retry": 4,
}
# What some seeds do more of.
FOCUS: Mapping[str, Mapping[str, int]] = {
    "all": {},
    "stops": {"stop": 60, "post": 60},
    "archives": {"archive": 30, "restore": 10, "send": 50},
    "forks": {"post": 90, "archive": 25, "restore": 8},
    "asks": {"post": 80, "send": 30, "archive": 0},
}


class Op(Struct, frozen=True):
    """One thing that a client does. Its details are drawn when it is done, from what there is."""

    place: int
    client: int
    kind: str


class Plan(Struct, frozen=True):
    seed: int
    rates: tuple[tuple[str, float], ...]  # of what can happen at a call
    events: frozenset[str]  # of EVENTS, those that happen
    ops: tuple[Op, ...]
    limits: Limits
    settings: Settings
    clients: int
    tenants: int
    gateways: int
    workers: int
    replies: int
    projections: int
    cached: int  # states in a handler
    skew_s: float  # how early or late a process's clock is at most
    wire_s: float  # how long a call takes at most when nothing goes wrong
    focus: str
    waits: float  # how often a model that sends wants a reply
    talkative: float  # how often it calls tools


class Options(Struct, frozen=True):
    """What a shrunk run leaves out. `ops` None: all of them; `faults` None: all that are drawn."""

    ops: frozenset[int] | None = None
    faults: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    in_order: bool = False
    trace: bool = False


def plan_of(seed: int) -> Plan:
    chance = random.Random(f"plan/{seed}")
    calm = chance.random() < 0.1
    rates: list[tuple[str, float]] = []
    for kind, most in FAULTS.items():
        on, share = chance.random() < 0.55, chance.choice((0.1, 0.4, 1.0))
        if on and not calm:
            rates.append((kind, most * share))
    events = frozenset(kind for kind in EVENTS if chance.random() < 0.5 and not calm)
    clients = chance.choice((1, 2, 2, 3))
    count = chance.choice((5, 8, 8, 12, 12, 16, 24))
    focus = chance.choice(("all", "all", "stops", "archives", "forks", "asks"))
    weights = {**OPS, **FOCUS[focus]}
    kinds = chance.choices(tuple(weights), weights=tuple(weights.values()), k=count)
    tenants = chance.choice((1, 1, 2))
    sessions = chance.choice((1, 1, 2))  # of each tenant
    ops = [Op(place, place % clients, "create") for place in range(tenants * sessions)]
    kinds = ["open"] * chance.choice((2, 2, 3)) * len(ops) + kinds
    ops += [Op(len(ops) + n, chance.randrange(clients), kind) for n, kind in enumerate(kinds)]
    limits = Limits(
        text_bytes=4_000,
        inline_bytes=chance.choice((60, 4_000)),
        inbox_entries=chance.choice((2, 4, 256)),
        wait_default_s=6.0,
        wait_max_s=40.0,
        turn_steps=chance.choice((3, 5)),
        turn_calls=3,
        turn_time_s=chance.choice((25.0, 120.0)),
        model_attempts=3,
        model_pause_max_s=4.0,
        turn_attempts=chance.choice((3, 5)),
        chain_hops=chance.choice((1, 2, 4, 4, 4)),
        command_ids=chance.choice((1, 1, 3, 256)),
    )
    return Plan(
        seed=seed,
        rates=tuple(rates),
        events=events,
        ops=tuple(ops),
        limits=limits,
        settings=Settings(
            limits=limits,
            model="offline:echo",
            turns_admitted=chance.choice((1, 2, 1000)),
            replies_partitions=chance.choice((1, 2)),
        ),
        clients=clients,
        tenants=tenants,
        gateways=chance.choice((1, 2)),
        workers=chance.choice((1, 2, 2)),
        replies=chance.choice((1, 2, 2)),
        projections=chance.choice((1, 1, 2)),
        cached=chance.choice((1, 2, 2_000, 2_000)),
        skew_s=0.0 if calm else chance.choice((0.0, 0.05, 2.0, 8.0)),
        wire_s=chance.choice((0.0, 0.002, 0.05)),
        focus=focus,
        waits=0.9 if focus in ("stops", "asks") else chance.choice((0.2, 0.65)),
        talkative=chance.choice((0.3, 0.9, 1.5)),
    )
