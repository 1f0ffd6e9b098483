"""The REST service: the same answers as the command line, over HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import version as version_of
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from meshwright.megatron_export import LAUNCHERS
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError

from . import catalog
from .answers import answer, estimate_data, estimate_document
from .bodies import CheckBody, DocumentBody, EstimateBody, ExportBody, PlanBody
from .checks import run_check
from .exports import export_files, read_place, zip_of
from .openapi import describe_bodies, json_body
from .plan_files import plan_document
from .problems import RequestError, install
from .request_body import read_json
from .requests import in_field, plan_request, read_calibration
from .store import PlanStore, plan_id

T = TypeVar("T")

_PLAN = {"model": PlanDocument, "description": "The plan document; status infeasible says that nothing fits, and why"}

_FILES: dict[str, Any] = {
    "description": "Names and texts, or a zip archive for `format=zip` or `Accept: application/zip`",
    "content": {"application/json": {}, "application/zip": {}},
}


def create_app(store: PlanStore | None = None, max_workers: int | None = None) -> FastAPI:
    """The service. ``max_workers`` bounds how many questions are worked on at once (default: one a core)."""
    app = FastAPI(
        title="Meshwright",
        version=version_of("meshwright"),
        description="Plans large-model training: the fastest parallel plan that fits, what it costs, and its files. "
        "Errors are application/problem+json (RFC 9457) with JSON pointers to the wrong fields.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    install(app)
    _add_plans(app, store or PlanStore(), _Workers(max_workers or os.cpu_count() or 1))
    _add_catalog(app)

    @app.get("/healthz", tags=["service"], summary="Whether the service is up")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "version": app.version}

    describe_bodies(app, (PlanBody, EstimateBody, DocumentBody, CheckBody, ExportBody))
    return app


class _Workers:
    """Runs CPU-heavy calls in threads, a bounded number at a time, so that the service keeps answering."""

    def __init__(self, count: int):
        self._free = asyncio.Semaphore(count)

    async def run(self, work: Callable[[], T]) -> T:
        async with self._free:
            return await run_in_threadpool(work)


def _add_plans(app: FastAPI, store: PlanStore, workers: _Workers) -> None:
    def stored(key: str) -> PlanDocument:
        document = store.get(key)
        if document is None:
            raise RequestError(404, f"there is no plan {key[:80]}; plans are kept for a while after they are made")
        return document

    def plan(data: Any) -> tuple[PlanDocument, bool]:
        request, _ = plan_request(data, PlanBody)
        key = plan_id(request, app.version)
        known = store.get(key)
        if known is not None and known.complete:
            return known, False
        document = answer(request)
        run = document.run.model_copy(update={"id": key}) if document.run else None
        document = document.model_copy(update={"run": run})
        store.put(key, document)
        return document, True

    @app.post(
        "/v1/plans",
        tags=["plans"],
        summary="Find the best plans",
        status_code=201,
        responses={201: _PLAN, 200: _PLAN | {"description": "The same, for a request that was answered before"}},
        openapi_extra=json_body(PlanBody),
    )
    async def create_plan(request: Request) -> Response:
        document, new = await workers.run(partial(plan, await read_json(request)))
        headers = {"Location": f"/v1/plans/{document.run.id}"} if document.run and document.run.id else {}
        return JSONResponse(document.to_json(), status_code=201 if new else 200, headers=headers)

    @app.get("/v1/plans/{plan_id}", tags=["plans"], summary="A plan that was made", responses={200: _PLAN})
    async def get_plan(plan_id: str) -> Response:
        return JSONResponse(stored(plan_id).to_json())

    @app.get(
        "/v1/plans/{plan_id}/export/{target}",
        tags=["plans"],
        summary="The files that run a plan",
        responses={200: _FILES},
    )
    async def export_plan(
        plan_id: str,
        target: str,
        launcher: Annotated[str, Query(description=f"One of {', '.join(LAUNCHERS)}")] = "torchrun",
        format: Annotated[str | None, Query(description="json or zip")] = None,
        accept: Annotated[str, Header()] = "*/*",
    ) -> Response:
        return await exported(plan_id, target, ExportBody(launcher=launcher), format, accept)

    @app.post(
        "/v1/plans/{plan_id}/export/{target}",
        tags=["plans"],
        summary="The files that run a plan, for given hosts and a site",
        responses={200: _FILES},
        openapi_extra=json_body(ExportBody),
    )
    async def export_plan_at(
        plan_id: str,
        target: str,
        request: Request,
        format: Annotated[str | None, Query(description="json or zip")] = None,
        accept: Annotated[str, Header()] = "*/*",
    ) -> Response:
        return await exported(plan_id, target, ExportBody.read(await read_json(request)), format, accept)

    async def exported(plan_id: str, target: str, body: ExportBody, format: str | None, accept: str) -> Response:
        if format not in (None, "json", "zip"):
            raise SpecError(Fault("/format", f"is not a form of the answer, got {format[:40]!r}", ("json", "zip")))
        document = stored(plan_id)
        if document.plan is None:
            raise RequestError(409, f"the answer holds no plan: {document.reason or document.status}")
        hosts, site = read_place(body.hosts, body.site)
        files = await workers.run(partial(export_files, document, target, body.launcher, hosts, site))
        if format == "zip" or (format is None and "application/zip" in accept):
            name = f'attachment; filename="{plan_id}.zip"'
            return Response(zip_of(files), media_type="application/zip", headers={"Content-Disposition": name})
        return JSONResponse({"files": files})

    @app.post(
        "/v1/estimates",
        tags=["plans"],
        summary="Price a plan that you give",
        responses={200: _PLAN},
        openapi_extra=json_body(EstimateBody, DocumentBody),
    )
    async def create_estimate(request: Request) -> Response:
        data = await read_json(request)
        work: Callable[[], PlanDocument]
        if isinstance(data, dict) and "document" in data:
            body = DocumentBody.read(data)
            calibration = in_field("/calibration", lambda: read_calibration(body.calibration))
            work = partial(estimate_document, plan_document(body.document), body.memory_headroom, calibration)
        else:
            work = partial(estimate_data, data)
        return JSONResponse((await workers.run(work)).to_json())

    @app.post(
        "/v1/checks",
        tags=["plans"],
        summary="Check Megatron arguments",
        responses={200: {"description": "Whether they are legal and fit, with every broken rule"}},
        openapi_extra=json_body(CheckBody),
    )
    async def create_check(request: Request) -> Response:
        data = await read_json(request)
        return JSONResponse(await workers.run(partial(run_check, data)))


def _add_catalog(app: FastAPI) -> None:
    @app.get("/v1/catalog/{kind}", tags=["catalog"], summary="Everything known by name: gpus, models, targets, links")
    def get_catalog(kind: str) -> dict[str, Any]:
        _known(kind)
        return {"items": catalog.entries(kind)}

    @app.get("/v1/catalog/{kind}/{name:path}", tags=["catalog"], summary="One entry in full")
    def get_entry(kind: str, name: str) -> Any:
        _known(kind)
        try:
            return catalog.entry(kind, name)
        except SpecError as error:
            raise RequestError(404, str(error)) from None

    def _known(kind: str) -> None:
        if kind not in catalog.KINDS:
            raise RequestError(404, f"there is no catalog of {kind[:40]!r}; there is {', '.join(catalog.KINDS)}")
