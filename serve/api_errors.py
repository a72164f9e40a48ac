"""Errors in the shape OpenAI clients know: {"error": {"message", "type", "param", "code"}}."""

import logging
import re
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serve.async_engine import EngineStopped, Overloaded
from target_model.errors import UserError

logger = logging.getLogger("serve.http")

Body = TypeVar("Body", bound=BaseModel)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}  # else by class
_UNION_BRANCH = re.compile(r"^<.+>$")  # as the types tag it


class ApiError(Exception):
    """An answer with an error status. `param` is the field of the request at fault, `code` a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status)


def refusal(message: str, param: str) -> ApiError:
    """The answer to a request whose field `param` has a value that cannot be."""
    return ApiError(400, f"{param}: {message}", param, "invalid_value")


def parse_body(model: type[Body], body: bytes) -> Body:
    """The typed request in a body; ApiError 400 names what is wrong with it."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _from_validation(error) from None


def _from_validation(error: ValidationError) -> ApiError:
    """The first fault: an object's kind is its first field, and unions know which branch is meant."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {fault['msg'].removeprefix('Invalid JSON: ')}", "body")
    path = ""
    for index, part in enumerate(fault["loc"]):
        if isinstance(part, int):
            path += f"[{part}]"
        elif index == 0 or not _UNION_BRANCH.match(part):
            path += f".{part}" if path else part
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"{path}: unknown or unsupported field", path, "unsupported_field")
    if fault["type"] == "value_error" and re.match(r"^[a-z_]+: ", message):
        # A rule between fields names its field itself, relative to the object it belongs to.
        name, message = message.split(": ", 1)
        path = f"{path}.{name}" if path else name
    return ApiError(400, f"{path or 'body'}: {message}", path or "body", "invalid_value")


def from_user_error(error: UserError, fields: set[str], source: str) -> ApiError:
    """A refusal by the tokenizer or the engine. Its message begins with what is at fault; a prompt is `source`."""
    message = str(error)
    found = re.match(r"^(?:the )?(([a-z_]+)(?:\[\d+\]|\.[a-z_]+)*)", message)
    param = found[1] if found and found[2] in fields else None
    if found and found[2] in ("prompt", "text"):
        param = source
    code = "context_length_exceeded" if "the context holds" in message else "invalid_value"
    return ApiError(400, message, param, code)


def from_exception(error: Exception) -> ApiError:
    """What a client is told of an error. Faults of the server go to the log in full."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), code="overloaded")
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="unavailable")
    if isinstance(error, ClientDisconnect):
        # Nobody reads this; the log line says it as other servers' do.
        return ApiError(499, "the client has hung up", code="client_closed_request")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    logger.error("internal error", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}), see the server's log", code="internal_error")


async def handle(request: Request, error: Exception) -> JSONResponse:
    """The exception handler of the whole application."""
    return from_exception(error).response()
