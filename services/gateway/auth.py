"""What a request must bring before anything of it is looked at: a key, and nothing unknown."""

import hmac
from typing import Any

from litestar import Request, Response

from plait.events.errors import Invalid, shown
from plait.events.settings import Settings
from plait.services.gateway.problems import Unauthorized, UnsupportedMediaType

KNOWN_QUERY = "query"  # option of a handler: the names of its query parameters
ALLOW = "allow"  # option of a handler of OPTIONS: the methods of its path
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

    async def __call__(self, request: Request[Any, Any, Any]) -> Response[None] | None:
        options = request.route_handler.opt
        if request.method == "OPTIONS":
            # Litestar's own answer names only the first method that a path was given.
            return Response(None, status_code=204, headers={"Allow": options[ALLOW]})
        if PUBLIC not in options:
            header = request.headers.get("authorization")
            request.scope[_TENANT] = authenticate(header, self._settings)  # type: ignore[literal-required]
        if request.scope["query_string"]:
            known: frozenset[str] = options.get(KNOWN_QUERY, frozenset())
            given = [name for name, _ in request.query_params.multi_items()]
            unknown = set(given) - known
            if unknown:
                listed = ", ".join(sorted(known)) or "none"
                raise Invalid(
                    f"unknown query parameter {shown(min(unknown))}; this call knows {listed}"
                )
            for name in known:
                if given.count(name) > 1:
                    raise Invalid(f"the query parameter `{name}` is given more than once")
        if request.method in ("POST", "PUT", "PATCH"):
            content_type = request.headers.get("content-type", "application/json")
            media_type = content_type.partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise UnsupportedMediaType(
                    f"the body is {shown(content_type)}: send application/json"
                )
        return None
