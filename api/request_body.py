"""Reading request bodies: JSON only, bounded, strict."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from .problems import RequestError
from .strict_json import parse_json

#: The largest honest body, a plan document for thousands of GPUs to be priced again, stays below 1 MB.
MAX_BODY_BYTES = 2 * 1024 * 1024


async def read_json(request: Request) -> Any:
    """The JSON value of a body.

    Raises :class:`RequestError` 400 for a client that goes away, 415 for another media type or an encoded body, 413
    beyond :data:`MAX_BODY_BYTES` (the rest is not read), and what :func:`parse_json` raises.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise RequestError(415, f"content-type must be application/json, got {media[:80] or 'none'}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(415, f"content-encoding {encoding[:40]} is not supported; send the body as it is")
    too_large = RequestError(413, f"the body is larger than {MAX_BODY_BYTES // 1024**2} MB")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 12 or int(length) > MAX_BODY_BYTES):
        raise too_large
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                raise too_large
    except ClientDisconnect:  # nobody will read this; but without it the log would show a traceback
        raise RequestError(400, "the client went away before the end of the body") from None
    return parse_json(bytes(raw))
