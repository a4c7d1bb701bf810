"""Logs of our processes: JSON lines on standard error, so that standard output is the answer."""

import logging
import sys

import structlog


def log_to_stderr(level: str, **context: str) -> None:
    """Libraries that log the standard way come out in the same form."""
    threshold = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        # Without the values of local variables: they hold keys, and what people say.
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ),
    ]
    structlog.contextvars.bind_contextvars(**context)
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        )
    )
    logging.basicConfig(level=threshold, handlers=[handler], force=True)
    for library in ("httpx", "httpx2", "httpcore", "httpcore2", "openai", "anthropic"):
        # They tell of every request; for debugging with its text, and with the answer's headers.
        logging.getLogger(library).setLevel(logging.WARNING)
