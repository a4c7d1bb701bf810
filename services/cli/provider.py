"""`plait provider`: a tenant's own providers of models. A key is never an argument, since those
are seen by everybody on the machine."""

import os
import sys
from getpass import getpass
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from plait.events.errors import Invalid
from plait.events.settings import without_password
from plait.services.cli.api import Api, Gateway
from plait.services.cli.show import Json, print_json
from plait.services.cli.terminal import Terminal


def list_(*, json: Json = False, gateway: Gateway | None = None) -> None:
    """List the tenant's own providers.

    Parameters
    ----------
    json
        Print JSON.
    """
    with Api(gateway) as api:
        found = api.get("/v1/providers")["items"]
    if json:
        return print_json(found)
    if not found:
        return Terminal().print("no providers yet: [bold]plait provider set NAME --kind openai[/]")
    table = Table.grid(padding=(0, 2))
    for item in found:
        key = "key set" if item["key_set"] else "no key"
        table.add_row(
            Text(item["name"]), item["kind"], Text(without_password(item["base_url"] or "")), key
        )
    return Terminal().print(table)


def set_(
    name: str,
    *,
    kind: Literal["openai", "anthropic"],
    base_url: str | None = None,
    key_from: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    header_from: Annotated[dict[str, str] | None, Parameter(negative=())] = None,
    stall_s: float | None = None,
    gateway: Gateway | None = None,
) -> None:
    """Set a provider; a model `name:model` is then asked there.

    Replaces what was set under the name, the key as well.

    Parameters
    ----------
    name
        What models are named by.
    kind
        The wire format.
    base_url
        Where it is; the provider's own address by default.
    key_from
        The environment variable that holds the key, or `-` for standard input.
    header_from
        Headers to send, each from an environment variable: `--header-from.X-Org=MY_ORG`.
    stall_s
        Seconds without a token until a call counts as failed.
    """
    body: dict[str, object] = {"kind": kind}
    if base_url is not None:
        body["base_url"] = base_url
    if key_from is not None:
        body["key"] = _read_key() if key_from == "-" else _variable(key_from)
    if header_from:
        body["headers"] = {header: _variable(name) for header, name in header_from.items()}
    if stall_s is not None:
        body["stall_s"] = stall_s
    with Api(gateway) as api:
        api.put(f"/v1/providers/{name}", body)
    Terminal().print(Text.assemble("models ", (f"{name}:…", "bold"), " are asked there"))


def remove_(name: str, *, gateway: Gateway | None = None) -> None:
    """Remove a provider, with its key.

    Parameters
    ----------
    name
        Its name.
    """
    with Api(gateway) as api:
        api.delete(f"/v1/providers/{name}")


def _read_key() -> str:
    if sys.stdin.isatty():
        return getpass("key: ")
    return sys.stdin.readline().strip()


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise Invalid("the environment variable that should hold it is not set, or is empty")
    return value
