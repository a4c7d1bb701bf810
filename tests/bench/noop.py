"""The HTTP stack with nothing behind it: what a command over HTTP is held against.

python -m tests.bench.noop PORT
"""

import sys

import uvloop
from granian.constants import Interfaces
from granian.server.embed import Server
from litestar import Litestar, post


@post("/", status_code=202)
async def nothing() -> None: ...


if __name__ == "__main__":
    uvloop.run(
        Server(
            Litestar([nothing], logging_config=None, openapi_config=None),
            address="127.0.0.1",
            port=int(sys.argv[1]),
            interface=Interfaces.ASGINL,
            websockets=False,
            log_enabled=False,
        ).serve()
    )
