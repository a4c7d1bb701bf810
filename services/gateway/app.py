"""The HTTP API as one Litestar application: routes, admission, errors, and the OpenAPI document."""

from litestar import Litestar
from litestar.datastructures import State
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme, Tag
from litestar.routes import HTTPRoute

from plait.services.gateway import events, providers, reads, writes
from plait.services.gateway.auth import ALLOW, KNOWN_QUERY, PUBLIC, Admission
from plait.services.gateway.call import Call, Gateway
from plait.services.gateway.problems import HANDLERS
from plait.services.gateway.shapes import BODIES

JSON_ESCAPES = 6  # bytes that one byte of text can take: \u0000
BODY_REST_BYTES = 64 * 1024  # of a body, beside its text

_DESCRIPTION = """\
Conversations as branches that work together.

Every call names its tenant by `Authorization: Bearer <key>`. Errors are
`application/problem+json` with a stable `code`. POSTs take an `Idempotency-Key`. Every answer to a
command has a `position`: give it to a query as `min_position`, and the answer covers the command.
Without, an answer may be a moment old; but a query says that something is unknown only when it has
caught up with the log, and is a 503 `read_model_behind` when it cannot in time. A 503 `unavailable`
comes within seconds and says what to do; a command may have been taken then: send it again with
the same `Idempotency-Key`.
Unknown fields and query parameters are refused.
"""


def create_app(gateway: Gateway) -> Litestar:
    app = Litestar(
        [*writes.ROUTES, *reads.ROUTES, *events.ROUTES, *providers.ROUTES],
        request_class=Call,
        before_request=Admission(gateway.settings),
        exception_handlers=HANDLERS,
        request_max_body_size=gateway.settings.limits.text_bytes * JSON_ESCAPES + BODY_REST_BYTES,
        state=State({"gateway": gateway}, deep_copy=False),
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="Plait",
            version="1",
            description=_DESCRIPTION,
            path="/schema",
            render_plugins=[JsonRenderPlugin(path=["/", "/openapi.json"])],
            components=Components(
                security_schemes={"key": SecurityScheme(type="http", scheme="bearer")}
            ),
            security=[{"key": []}],
            tags=[
                Tag("sessions", "A session is one graph with one ROOT and a HEAD."),
                Tag("messages", "What users and branches say."),
                Tag("branches", "Lines of conversation."),
                Tag("turns", "Runs of the model on a branch."),
                Tag("providers", "Where models are, and with which key."),
                Tag("health", "For balancers."),
            ],
        ),
    )
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for handler, parameters in route.route_handler_map.values():
                known = frozenset(
                    parameter.field_alias for parameter in parameters.expected_query_params
                )
                handler.opt[KNOWN_QUERY] = known
                if route.path.startswith("/schema") or "OPTIONS" in handler.http_methods:
                    handler.opt[PUBLIC] = True
                if "OPTIONS" in handler.http_methods:
                    handler.opt[ALLOW] = ", ".join(sorted(route.methods))
    schemas = app.openapi_schema.components.schemas or {}
    for body in BODIES:
        # Litestar leaves out what msgspec enforces.
        schemas[body.__name__].additional_properties = False
    return app
