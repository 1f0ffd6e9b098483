"""The request bodies in the OpenAPI page. Endpoints read them on their own, so FastAPI cannot know them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from .bodies import Body

_REF = "#/components/schemas/{model}"


def json_body(*bodies: type[Body]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint that takes one of ``bodies``."""
    refs = [{"$ref": _REF.format(model=body.__name__)} for body in bodies]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI, bodies: tuple[type[Body], ...]) -> None:
    """Add the schemas of ``bodies`` and of the problem document to the OpenAPI page of ``app``."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = plain()
            schemas = page.setdefault("components", {}).setdefault("schemas", {})
            for body in bodies:
                schema = body.model_json_schema(ref_template=_REF)
                schemas |= schema.pop("$defs", {})
                schemas[body.__name__] = schema
            schemas["Problem"] = _PROBLEM
            content = {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}}
            for path in page["paths"].values():
                for operation in path.values():
                    operation["responses"]["4XX"] = {"description": "A problem (RFC 9457)", "content": content}
                    operation["responses"].pop("422", None)
            app.openapi_schema = page
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


_TEXT = {"type": "string"}
_PROBLEM: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": _TEXT,
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["pointer", "detail"],
                "properties": {
                    "pointer": {**_TEXT, "description": "JSON pointer (RFC 6901) into the request body"},
                    "detail": _TEXT,
                    "alternatives": {"type": "array", "items": _TEXT},
                },
            },
        },
        "violations": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"rule": _TEXT, "message": _TEXT, "alternatives": {"type": "array", "items": _TEXT}},
            },
        },
    },
}
