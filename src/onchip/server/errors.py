"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, the message one sentence that says what to do."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from onchip.server.serving import Overloaded

TYPES = {401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error", 501: "not_implemented_error", 503: "overloaded_error"}

ROUTES = "give POST to /v1/chat/completions, /v1/completions or /v1/embeddings, GET to /v1/models, /health, /metrics or /"


class ApiError(Exception):
    """An answer that is an error: its status, its sentence, the field that is to blame and OpenAI's code where it has one."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def respond(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error response; one that may succeed later says when to come back."""
    headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status)
    return JSONResponse(body(status, message, param, code), status, headers)


def install(app: FastAPI) -> None:
    """Every error that a route raises becomes one of these responses; a bug is a 500 whose traceback stays in the log."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> JSONResponse:
        return respond(error.status, str(error), error.param, error.code)

    @app.exception_handler(Overloaded)
    async def _overloaded(request: Request, error: Overloaded) -> JSONResponse:
        return respond(503, str(error), code="overloaded")

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return respond(400, *_sentence(error))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code in (404, 405):
            answer = respond(error.status_code, f"{request.method} {request.url.path} is not served here; {ROUTES}")
            answer.headers.update(error.headers or {})  # Allow
            return answer
        if error.status_code == 400:  # FastAPI's, for whatever else its JSON parser raises
            return respond(400, "the body cannot be read: it is not UTF-8, is compressed, is nested too deeply, or has a number of thousands of digits")
        return respond(error.status_code, error.detail or HTTPStatus(error.status_code).phrase)

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        return respond(500, f"the server failed on this request ({type(error).__name__}); its log says where")


def _sentence(error: RequestValidationError) -> tuple[str, str | None]:
    """pydantic's first complaint as a sentence, and the field it is about."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    field = f"{'.'.join(str(part) for part in first['loc'][1:]):.120}" or None  # a client's own name may have 4 MB
    if first["type"] == "extra_forbidden":
        return f"{field} is not a field that this server knows; leave it out", field
    if first["type"] == "missing":
        return (f"{field} is missing; it is required" if field else "the body is empty; give a JSON object"), field
    if isinstance(first["input"], bytes):
        return "the body is not read as JSON; send it with the header 'Content-Type: application/json'", None
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return (f"{field}: {said}" if field and not said.startswith(str(first["loc"][-1])) else said), field
    return f"{field or 'the body'} is {_short(first['input'])}; {said[:1].lower()}{said[1:]}", field


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
