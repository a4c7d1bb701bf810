"""The `plait` command. Exit codes: 0 done, 1 the operation failed (why is on standard error),
2 the command line is wrong, 130 interrupted.

Each command lives in a module of its own idea, imported when it is called: help is quick.
"""

import os
import sys
from importlib.metadata import version

from cyclopts import App, Group

from plait.events.errors import PlaitError
from plait.services.cli.terminal import adapt_streams, plain

RUN = Group("Run", sort_key=1)
TALK = Group("Talk to a running gateway (PLAIT_URL, PLAIT_KEY)", sort_key=2)
OPERATE = Group("Operate", sort_key=3)

app = App(
    name="plait",
    help="LLM conversations as branches that work together, durable and multi-tenant.\n\n"
    "Begin with `plait demo`, or run everything with `plait dev` and talk to it with "
    "`plait chat`. Each command tells more with `--help`. Exit codes: 0 done, 1 the operation "
    "failed, 2 the command line is wrong.",
    version=lambda: version("plait"),
    result_action="return_value",
)

providers = App(name="provider", help="Set where models are, and with which key.", group=TALK)

for group, module, commands in (
    (
        RUN,
        "dev",
        {
            "dev": "Run everything, with embedded NATS and Valkey; keeps its data.",
        },
    ),
    (
        RUN,
        "demo",
        {
            "demo": "See one branch ask another, end to end; needs no key and no network.",
        },
    ),
    (
        RUN,
        "services",
        {
            "gateway": "Run the HTTP API.",
            "turns": "Run model turns.",
            "replies": "Run what carries messages and replies between branches.",
            "projections": "Run what builds the read models.",
        },
    ),
    (
        TALK,
        "chat",
        {
            "chat": "Talk on a session's branches.",
        },
    ),
    (
        TALK,
        "show",
        {
            "sessions": "List sessions, newest first.",
            "log": "Print a session's events.",
            "context": "Print what the next model call on a branch would see.",
            "dag": "Draw a session's graph.",
        },
    ),
    (
        OPERATE,
        "operate",
        {
            "doctor": "Check configuration, versions, durability and lag.",
            "rebuild": "Build the read models anew beside the live ones, then swap.",
        },
    ),
):
    for name, text in commands.items():
        app.command(f"plait.services.cli.{module}:{name}", name=name, help=text, group=group)

for name, text in {
    "list": "List the tenant's own providers.",
    "set": "Set a provider; a model `name:model` is then asked there.",
    "remove": "Remove a provider, with its key.",
}.items():
    providers.command(f"plait.services.cli.provider:{name}_", name=name, help=text)
app.command(providers)


def main() -> None:
    adapt_streams()
    try:
        code = app()
        sys.stdout.flush()
    except BrokenPipeError:  # `plait log … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (PlaitError, OSError) as error:  # such as a directory that may not be written
        print(plain(f"plait: {error}"), file=sys.stderr)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
