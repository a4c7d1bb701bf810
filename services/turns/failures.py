"""What went wrong in a call, as one of ours: retryable or final, with a stable code.

The texts are our own. A provider's may quote the key, or the conversation, and events are for
ever: of it only the status and the machine-readable code are kept.
"""

import re

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelServerError,
    ModelUnavailableError,
    UnexpectedModelBehavior,
)

from plait.events.errors import ModelFailure
from plait.services.turns.models import ModelError, RetryLater

_CODE = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_AGAIN = frozenset({408, 409, 425, 429})
_TOO_LONG = ("prompt is too long", "maximum context length", "context window")


def stalled(provider: str, stall_s: float) -> RetryLater:
    return RetryLater(f"{provider} sent nothing for {stall_s:g} s", ModelFailure.STALLED)


def check_finish(reason: str | None) -> None:
    """Raises unless the provider said that the answer is whole."""
    if reason is None:
        raise RetryLater("the stream ended before the answer did", ModelFailure.CUT_OFF)
    if reason == "content_filter":
        raise ModelError(
            "the provider's content filter stopped the answer", ModelFailure.CONTENT_FILTER
        )
    if reason == "error":
        raise RetryLater("the provider broke off the answer", ModelFailure.PROVIDER_UNAVAILABLE)


def failure_of(error: Exception, provider: str) -> ModelError | RetryLater:
    told = _told(error)
    match error:
        case ModelContextWindowExceededError():
            return ModelError(
                f"the context is longer than the model takes{told}", ModelFailure.CONTEXT_TOO_LONG
            )
        case ModelAuthenticationError():
            return ModelError(f"{provider} does not accept the key{told}", ModelFailure.BAD_KEY)
        case ModelQuotaExceededError():
            return ModelError(
                f"the account with {provider} is used up{told}", ModelFailure.QUOTA_EXCEEDED
            )
        case ModelNotFoundError():
            return ModelError(
                f"{provider} does not have this model{told}", ModelFailure.UNKNOWN_MODEL
            )
        case ModelRateLimitError():
            return RetryLater(
                f"{provider} limits the rate{told}", ModelFailure.RATE_LIMITED, error.retry_after
            )
        case ModelUnavailableError() | ModelServerError():
            return RetryLater(
                f"{provider} failed{told}", ModelFailure.PROVIDER_UNAVAILABLE, error.retry_after
            )
        case ModelConnectionError(phase="read"):
            return RetryLater(f"the connection to {provider} broke off", ModelFailure.CUT_OFF)
        case ModelConnectionError():
            return RetryLater(f"{provider} cannot be reached", ModelFailure.PROVIDER_UNAVAILABLE)
        case ModelHTTPError() if error.status_code in _AGAIN or error.status_code >= 500:
            return RetryLater(
                f"{provider} failed{told}", ModelFailure.PROVIDER_UNAVAILABLE, error.retry_after
            )
        case ModelHTTPError() if error.status_code == 413 or _says_too_long(error):
            return ModelError(
                f"the context is longer than the model takes{told}", ModelFailure.CONTEXT_TOO_LONG
            )
        case ModelHTTPError() | ModelRequestRejectedError():
            return ModelError(f"{provider} refused the request{told}", ModelFailure.BAD_REQUEST)
        case ModelAPIError() | UnexpectedModelBehavior() if "ended without" in error.message:
            return RetryLater("the stream ended before the answer did", ModelFailure.CUT_OFF)
        case ModelAPIError() if error.in_stream:
            return RetryLater(
                f"{provider} broke off the answer{told}", ModelFailure.PROVIDER_UNAVAILABLE
            )
        case ModelAPIError() | UnexpectedModelBehavior():
            return RetryLater(f"{provider} sent what is no answer", ModelFailure.MALFORMED)
        case _ if type(error).__module__.partition(".")[0] in ("httpx2", "httpcore2", "httpx"):
            return RetryLater(f"the connection to {provider} broke off", ModelFailure.CUT_OFF)
        case ValueError():  # Of a library that reads what the provider sent.
            return RetryLater(f"{provider} sent what is no answer", ModelFailure.MALFORMED)
        case _:
            return ModelError(f"the model failed ({type(error).__name__})")


def _says_too_long(error: ModelHTTPError) -> bool:
    """Servers that speak a provider's language do not always use its words for this."""
    said = str(error.body).lower()
    return error.status_code == 400 and any(words in said for words in _TOO_LONG)


def _told(error: Exception) -> str:
    """The status and the provider's own code, in brackets, as far as there are any."""
    parts: list[str] = []
    if isinstance(error, ModelHTTPError):
        parts.append(f"HTTP {error.status_code}")
    if isinstance(error, ModelAPIError):
        for code in (error.provider_error_code, error.provider_error_type):
            if code and _CODE.fullmatch(code) and code not in parts:
                parts.append(code)
    return f" ({', '.join(parts)})" if parts else ""
