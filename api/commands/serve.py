"""``meshwright serve``: the REST service."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import exit_codes

Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen on; 0 picks one.")]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="NAME", help="critical, error, warning, info or debug.")]


def serve(host: Host = "127.0.0.1", port: Port = 8000, log_level: LogLevel = "info") -> int:
    """Serve plans over REST; the API page is at /docs.

    \b
    Examples:
      meshwright serve
      meshwright serve --host 0.0.0.0 --port 8080
    """
    if log_level not in ("critical", "error", "warning", "info", "debug"):
        raise typer.BadParameter(f"--log-level: no such level {log_level[:40]!r}")
    import uvicorn

    from ..rest import create_app

    server = uvicorn.Server(uvicorn.Config(create_app(), host=host, port=port, log_level=log_level))
    try:
        server.run()
    except SystemExit:  # uvicorn exits with its own code when it cannot bind; it has logged why
        return exit_codes.BAD_INPUT
    return exit_codes.DONE if server.started else exit_codes.BAD_INPUT
