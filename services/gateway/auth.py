"""What a request must bring before anything of it is looked at: a key, and nothing unknown."""

import hmac
from typing import Any

from litestar import Request

from plait.events.errors import Invalid
from plait.events.settings import Settings
from plait.services.gateway.problems import Unauthorized, UnsupportedMediaType

KNOWN_QUERY = "query"  # option of a handler: the names of its query parameters
PUBLIC = "public"  # option of a handler that needs no key
_TENANT = "plait.tenant"


def tenant_of(request: Request[Any, Any, Any]) -> str:
    tenant: str = request.scope[_TENANT]  # type: ignore[literal-required]
    return tenant


def authenticate(header: str | None, settings: Settings) -> str:
    """The tenant that the header's key belongs to. Raises Unauthorized."""
    scheme, _, key = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized("give the key of a tenant: `Authorization: Bearer <key>`")
    if not hmac.compare_digest(key.strip().encode(), settings.key.encode()):
        raise Unauthorized("this key is unknown")
    return settings.tenant


class Admission:
    """Runs before every route, and before its body is read. (As a guard it would cost a copy of
    the handler for each call.)"""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def __call__(self, request: Request[Any, Any, Any]) -> None:
        options = request.route_handler.opt
        if PUBLIC not in options:
            header = request.headers.get("authorization")
            request.scope[_TENANT] = authenticate(header, self._settings)  # type: ignore[literal-required]
        if request.scope["query_string"]:
            known: frozenset[str] = options.get(KNOWN_QUERY, frozenset())
            unknown = set(request.query_params) - known
            if unknown:
                listed = ", ".join(sorted(known)) or "none"
                raise Invalid(f"unknown query parameter {min(unknown)!r}; this call knows {listed}")
        if request.method in ("POST", "PUT", "PATCH"):
            given = request.headers.get("content-type", "application/json")
            media_type = given.partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise UnsupportedMediaType(f"the body is {given!r}: send application/json")
