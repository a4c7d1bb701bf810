"""Errors become HTTP here and nowhere else: RFC 9457 problems with a stable `code`."""

import http
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import ParameterKwarg
from msgspec import UNSET, Struct, UnsetType

from plait.events.errors import Code, PlaitError, Retryable, shown

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1

STATUS: dict[Code, int] = {
    Code.INVALID: 400,
    Code.BAD_POSITION: 400,
    Code.BROKEN_EDGE: 400,
    Code.SELF_SEND: 400,
    Code.UNAUTHORIZED: 401,
    Code.NOT_FOUND: 404,
    Code.UNKNOWN_SESSION: 404,
    Code.UNKNOWN_BRANCH: 404,
    Code.UNKNOWN_NODE: 404,
    Code.UNKNOWN_TURN: 404,
    Code.UNKNOWN_MESSAGE: 404,
    Code.UNKNOWN_PROVIDER: 404,
    Code.METHOD_NOT_ALLOWED: 405,
    Code.AMBIGUOUS_BRANCH: 409,
    Code.BRANCH_ARCHIVED: 409,
    Code.BRANCH_MERGED: 409,
    Code.RESERVATION_GONE: 409,
    Code.NAME_TAKEN: 409,
    Code.NOT_A_TIP: 409,
    Code.WAIT_CYCLE: 409,
    Code.BUDGET_EXCEEDED: 409,
    Code.BRANCH_BUSY: 409,
    Code.TURN_ENDED: 409,
    Code.TURN_ACTIVE: 409,
    Code.STALE_CLAIM: 409,
    Code.NO_SECRET: 409,
    Code.IDEMPOTENCY_MISMATCH: 409,
    Code.CONFLICT: 409,
    Code.TEXT_TOO_LONG: 413,
    Code.INBOX_FULL: 429,
    Code.READ_MODEL_BEHIND: 503,
    Code.UNAVAILABLE: 503,
    Code.INTERNAL: 500,
}

# Litestar's own refusals, by status.
_CODE = {
    401: Code.UNAUTHORIZED,
    404: Code.NOT_FOUND,
    405: Code.METHOD_NOT_ALLOWED,
    413: Code.TEXT_TOO_LONG,
    503: Code.UNAVAILABLE,
}

# Where there is what the caller looks for.
_FOUND = {
    Code.UNKNOWN_SESSION: "GET /v1/sessions lists the sessions",
    Code.UNKNOWN_BRANCH: "GET /v1/sessions/{session_id}/branches lists a session's branches",
    Code.UNKNOWN_NODE: "GET /v1/sessions/{session_id}/dag lists a session's nodes",
    Code.UNKNOWN_TURN: "a posted message's answer has its `turn_id`, and so have the nodes of "
    "GET /v1/sessions/{session_id}/dag",
    Code.UNKNOWN_MESSAGE: "a sent message's answer has its `message_id`, and so has "
    "the MessageSent of GET /v1/sessions/{session_id}/events?from=start",
    Code.UNKNOWN_PROVIDER: "GET /v1/providers lists the providers",
}

log = structlog.get_logger("gateway")


class Problem(Struct, kw_only=True):
    """What went wrong, and what to do. `code` is stable; `data` holds what the error knows, such
    as the candidates for an ambiguous branch."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    data: dict[str, Any] | UnsetType = UNSET


class Unauthorized(PlaitError):
    code = Code.UNAUTHORIZED


class UnsupportedMediaType(PlaitError):
    code = Code.INVALID


def refusals(*codes: Code, public: bool = False) -> dict[int, ResponseSpec]:
    """The OpenAPI entries for what a route may refuse with. Those of every route are in it."""
    always = [Code.INVALID, Code.UNAVAILABLE, Code.INTERNAL]
    if not public:
        always.append(Code.UNAUTHORIZED)
    by_status: dict[int, list[str]] = defaultdict(list)
    for code in dict.fromkeys((*always, *codes)):
        by_status[STATUS[code]].append(f"`{code}`")
    return {
        status: ResponseSpec(
            Problem,
            generate_examples=False,
            media_type=MEDIA_TYPE,
            description=f"{http.HTTPStatus(status).phrase}: {', '.join(names)}",
        )
        for status, names in sorted(by_status.items())
    }


BODY_REFUSALS = {
    415: ResponseSpec(
        Problem,
        generate_examples=False,
        media_type=MEDIA_TYPE,
        description="Unsupported Media Type: the body is not application/json",
    ),
    413: refusals(Code.TEXT_TOO_LONG)[413],
}


def answer(
    status: int, code: str, detail: str, data: dict[str, Any] | None, headers: dict[str, str]
) -> Response[bytes]:
    problem = Problem(
        title=http.HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        data=data or UNSET,
    )
    return Response(
        msgspec.json.encode(problem), status_code=status, media_type=MEDIA_TYPE, headers=headers
    )


def _of_ours(_: Request[Any, Any, Any], error: PlaitError) -> Response[bytes]:
    status = 415 if isinstance(error, UnsupportedMediaType) else STATUS[error.code]
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, Retryable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    data = {name: value for name, value in vars(error).items() if value is not None}
    detail, hint = str(error) or error.code, _FOUND.get(error.code)
    return answer(status, error.code, f"{detail}; {hint}" if hint else detail, data, headers)


def _of_litestar(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    status = error.status_code
    if status >= 500:
        return _unexpected(request, error)
    detail = error.detail
    if status == 413:
        detail = "the body is larger than any text that is allowed: shorten it"
    elif status == 404:
        detail = f"there is nothing at {shown(request.url.path)}: see /schema"
    elif status == 405:
        methods = (error.headers or {}).get("allow", "")
        detail = f"{shown(request.url.path)} does not take {request.method}: it takes {methods}"
    elif isinstance(error.extra, list):
        detail = "; ".join(_field(request, item) for item in error.extra) or detail
    return answer(status, _CODE.get(status, Code.INVALID), detail, None, {**(error.headers or {})})


def _field(request: Request[Any, Any, Any], item: Any) -> str:
    """What a parameter takes, from what its route says of it."""
    if item.get("source") == "body":
        return "the call needs a JSON body"
    key = item.get("key", "")
    field = request.route_handler.parsed_fn_signature.parameters.get(key)
    given = None if field is None else field.kwarg_definition
    if field is None or not isinstance(given, ParameterKwarg):
        return f"`{key}` does not fit"
    kind = {int: "a whole number", float: "a number"}.get(field.annotation, "text")
    least = "" if given.ge is None else f", at least {given.ge}"
    most = "" if given.le is None else f", at most {given.le}"
    return f"`{given.name or key}` takes {kind}{least}{most}"


def _unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("request failed", method=request.method, path=request.url.path, exc_info=error)
    detail = "something went wrong here; the same call may be sent again"
    return answer(500, Code.INTERNAL, detail, None, {})


HANDLERS: dict[int | type[Exception], Callable[..., Response[bytes]]] = {
    PlaitError: _of_ours,
    HTTPException: _of_litestar,
    Exception: _unexpected,
}
