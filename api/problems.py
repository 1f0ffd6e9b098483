"""Errors of the REST service as ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from meshwright.planner.errors import DeadlineExceeded, IllegalPlan
from meshwright.specs.errors import SpecError

from .internal_error import incident_of
from .output import violation_dicts
from .strict_json import JSONSyntaxError

MEDIA_TYPE = "application/problem+json"
_TITLES = {
    400: ("malformed", "The body is not valid JSON"),
    404: ("not-found", "There is no such thing"),
    405: ("method-not-allowed", "The method is not allowed here"),
    406: ("not-acceptable", "The answer cannot be given in that form"),
    409: ("no-plan", "There is no plan to export"),
    413: ("too-large", "The body is too large"),
    415: ("unsupported-media-type", "The body must be application/json"),
    422: ("invalid-input", "The input is not valid"),
    500: ("internal-error", "Something went wrong inside"),
    503: ("deadline", "The deadline came before any plan"),
}
_log = logging.getLogger("meshwright.api")


class RequestError(Exception):
    """An error with a status that is sent to the client."""

    def __init__(self, status: int, detail: str):
        self.status, self.detail = status, detail
        super().__init__(detail)


def problem(
    status: int, detail: str, *, headers: Mapping[str, str] | None = None, kind: str | None = None, **members: Any
) -> JSONResponse:
    """A problem document; ``members`` are extensions such as ``errors`` and ``violations``."""
    word, title = _TITLES.get(status, ("error", "Error"))
    body = {"type": f"urn:meshwright:problem:{kind or word}", "title": title, "status": status, "detail": detail}
    return JSONResponse(body | members, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Turn every exception of an endpoint into a problem document."""

    @app.exception_handler(RequestError)
    async def _problem(request: Request, error: RequestError) -> JSONResponse:
        return problem(error.status, error.detail)

    @app.exception_handler(SpecError)
    async def _invalid(request: Request, error: SpecError) -> JSONResponse:
        status = 400 if isinstance(error, JSONSyntaxError) else 422
        errors = [
            {"pointer": f.pointer, "detail": f.message}
            | ({"alternatives": list(f.alternatives)} if f.alternatives else {})
            for f in error.faults
        ]
        return problem(status, str(error), errors=errors)

    @app.exception_handler(IllegalPlan)
    async def _illegal(request: Request, error: IllegalPlan) -> JSONResponse:
        rows = violation_dicts(error.violations)
        errors = [{"pointer": "", "detail": f"{row['rule']}: {row['message']}"} for row in rows]
        return problem(422, "The target refuses the plan", kind="illegal-plan", errors=errors, violations=rows)

    @app.exception_handler(DeadlineExceeded)
    async def _deadline(request: Request, error: DeadlineExceeded) -> JSONResponse:
        return problem(503, str(error) or "The deadline came before any plan was found")

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    async def _internal(request: Request, error: Exception) -> JSONResponse:
        incident = incident_of(error)
        _log.error("internal error %s", incident, exc_info=error)
        return problem(500, f"internal error {incident}; the service's log says where")
