"""POST /tokenize and /detokenize."""

import json

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serve.api_errors import from_user_error, parse_body, refusal
from serve.openai_types import DetokenizeRequest, TokenizeRequest
from serve.prompt import render
from serve.service import Service
from target_model.errors import UserError

_PIECE = 2**15  # ids written as JSON in one go: a few milliseconds, in which no other thread runs


def add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await request.body()
        return await service.off_loop(lambda: _tokenize(body, service), len(body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await request.body()
        return await service.off_loop(lambda: _detokenize(body, service), len(body))


def _tokenize(body: bytes, service: Service) -> Response:
    """The whole answer, written in pieces: json.dumps would let nobody else run until millions of ids are done."""
    request = parse_body(TokenizeRequest, body)
    service.check_model(request.model)
    tokens = _encode(request, service)
    pieces = [",".join(map(str, tokens[start : start + _PIECE])) for start in range(0, len(tokens), _PIECE)]
    head = json.dumps({"count": len(tokens), "max_model_len": service.context})
    return Response(f'{head[:-1]}, "tokens": [{",".join(pieces)}]}}', media_type="application/json")


def _encode(request: TokenizeRequest, service: Service) -> list[int]:
    try:
        if request.prompt is not None:
            return service.tokenizer.encode(request.prompt, allow_special=True)
    except UserError as error:
        raise from_user_error(error, set(), "prompt") from None
    tools = [tool.for_model() for tool in request.tools or []]
    messages = request.messages or []
    return render(messages, tools, request.thinking_mode, service, request.add_generation_prompt).token_ids


def _detokenize(body: bytes, service: Service) -> Response:
    request = parse_body(DetokenizeRequest, body)
    service.check_model(request.model)
    wrong = next((token for token in request.tokens if token >= service.tokenizer.vocab_size), None)
    if wrong is not None:
        raise refusal(f"there is no token {wrong}", "tokens")
    return JSONResponse({"prompt": service.tokenizer.decode(request.tokens)})
