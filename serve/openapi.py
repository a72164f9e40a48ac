"""The OpenAPI description at /openapi.json: the bodies that the endpoints parse themselves stand in it, too."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from serve.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def complete_openapi(app: FastAPI) -> None:
    """Completes the description of an application that has all its routes."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi


def _described(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    for operations in document["paths"].values():
        for operation in operations.values():
            content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
            operation["responses"]["default"] = {"description": "An error, named", "content": content}
            operation["responses"].pop("422", None)  # every refusal is a 400
    for path, model in BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document
