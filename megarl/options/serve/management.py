"""REST routes of the client beside training and sampling: training runs, checkpoints and their downloads, sessions, samplers.

The app that includes the router answers a `RequestError` as JSON `{"detail": sentence}` with its status. No final error has
status 409 or 5xx, after which the client asks again for minutes. FastAPI reads the annotations here, so they are no texts.
"""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send
from tinker import types
from tinker._models import BaseModel

from megarl.options.serve import answers
from megarl.options.serve.downloads import ARCHIVE, LINK_S, ROUTE, DownloadLinks, adapter_files, tar_bytes, tar_of
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.store import CheckpointInfo, CheckpointStore
from megarl.options.serve.tenants import Tenant, Tenants
from megarl.options.serve.values import RequestError

MOST_BODY_BYTES = 2**18
"""Bytes of a body of these routes, at most."""
RUN = "/api/v1/training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"


class _Reading(Response):
    """An answer that reads what is pinned. The pin ends with it, also where it is refused (a range behind the end) or breaks
    off, after which background tasks are not run."""

    def __init__(self, answer: Response, pinned: ExitStack) -> None:
        super().__init__()
        self._answer, self._pinned = answer, pinned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then unpin."""
        try:
            await self._answer(scope, receive, send)
        finally:
            await run_in_threadpool(self._pinned.close)


def management_router(store: CheckpointStore, tenants: Tenants, who: Callable[..., Any]) -> APIRouter:
    """The routes. `who` is the dependency that gives the `Tenant` of a request."""
    router = APIRouter()
    caller = Annotated[Tenant, Depends(who)]
    _add_runs(router, store, caller)
    _add_checkpoints(router, store, caller)
    _add_downloads(router, store, tenants, caller)
    _add_sessions(router, store, caller)
    _add_accounts(router, caller)
    return router


def _add_runs(router: APIRouter, store: CheckpointStore, caller: Any) -> None:
    @router.get("/api/v1/training_runs")
    def training_runs(
        tenant: caller, limit: str = "20", offset: str = "0", access_scope: str = "owned", project_id: str | None = None
    ) -> Response:
        _check_scope(access_scope)
        registry = store.registry
        projects = {session.id: session.project_id for session in registry.sessions.of(tenant.name)}
        runs = [run for run in registry.runs.of(tenant.name) if project_id is None or projects.get(run.session) == project_id]
        part, cursor = answers.page(runs, _number("limit", limit), _number("offset", offset))
        checkpoints: dict[str, list[CheckpointInfo]] = {}
        for info in store.listed(tenant.name):
            checkpoints.setdefault(info.path.run, []).append(info)
        found = [answers.run_answer(run, checkpoints.get(run.id, ())) for run in part]
        return _json(types.TrainingRunsResponse(training_runs=found, cursor=cursor))

    @router.get(RUN)
    def training_run(tenant: caller, run: str, access_scope: str = "owned") -> Response:
        _check_scope(access_scope)
        return _json(answers.run_answer(store.registry.runs.get(tenant.name, run), store.listed(tenant.name, run)))

    @router.get(RUN + "/checkpoints")
    def checkpoints_of_run(tenant: caller, run: str) -> Response:
        store.registry.runs.get(tenant.name, run)
        found = [answers.checkpoint_answer(info) for info in store.listed(tenant.name, run)]
        return _json(types.CheckpointsListResponse(checkpoints=found))


def _add_checkpoints(router: APIRouter, store: CheckpointStore, caller: Any) -> None:
    @router.get("/api/v1/checkpoints")
    def checkpoints(tenant: caller, limit: str = "100", offset: str = "0") -> Response:
        part, cursor = answers.page(store.listed(tenant.name), _number("limit", limit), _number("offset", offset))
        return _json(types.CheckpointsListResponse(checkpoints=[*map(answers.checkpoint_answer, part)], cursor=cursor))

    @router.delete(CHECKPOINT)
    def delete_checkpoint(tenant: caller, run: str, kind: str, name: str) -> Response:
        store.delete(tenant.name, CheckpointPath(run, kind, name))
        return Response(status_code=204)

    @router.post(CHECKPOINT + "/publish")
    def publish(tenant: caller, run: str, kind: str, name: str) -> Response:
        store.publish(tenant.name, CheckpointPath(run, kind, name), public=True)
        return Response(status_code=204)

    @router.delete(CHECKPOINT + "/publish")
    def unpublish(tenant: caller, run: str, kind: str, name: str) -> Response:
        store.publish(tenant.name, CheckpointPath(run, kind, name), public=False)
        return Response(status_code=204)

    @router.put(CHECKPOINT + "/ttl")
    async def set_ttl(request: Request, tenant: caller, run: str, kind: str, name: str) -> Response:
        body = await _body(request, ("ttl_seconds",))
        await run_in_threadpool(store.set_ttl, tenant.name, CheckpointPath(run, kind, name), body.get("ttl_seconds"))
        return Response(status_code=204)

    @router.post("/api/v1/weights_info")
    async def weights_info(request: Request, tenant: caller) -> Response:
        path = (await _body(request, ("tinker_path",))).get("tinker_path")
        if not isinstance(path, str):
            raise RequestError("tinker_path must be a text such as tinker://RUN/weights/NAME")
        return _json(answers.weights_answer(store.find(tenant.name, CheckpointPath.parse(path))))


def _add_downloads(router: APIRouter, store: CheckpointStore, tenants: Tenants, caller: Any) -> None:
    links = DownloadLinks(tenants.secret, store.clock)

    @router.get(CHECKPOINT + "/external_weights_urls")
    def external_weights_urls(request: Request, tenant: caller, run: str, kind: str, name: str) -> Response:
        path = CheckpointPath(run, kind, name)
        expires = int(store.clock()) + LINK_S
        with store.reading(tenant.name, path):
            names = adapter_files(path, store.files(path)) if kind != "external_weights" else {n: n for n in store.files(path)}
        urls = {shown: links.link(str(request.base_url), tenant.name, path, file, expires) for shown, file in names.items()}
        return _json(types.ExternalWeightsUrlsResponse(urls=urls, expires=answers.moment(expires)))

    @router.get(CHECKPOINT + "/archive")
    def archive(request: Request, tenant: caller, run: str, kind: str, name: str) -> Response:
        path = CheckpointPath(run, kind, name)
        expires = int(store.clock()) + LINK_S
        with store.reading(tenant.name, path):
            adapter_files(path, store.files(path))
        link = links.link(str(request.base_url), tenant.name, path, ARCHIVE, expires)
        return Response(
            status_code=302, headers={"Location": link, "Expires": f"{answers.moment(expires):%a, %d %b %Y %H:%M:%S GMT}"}
        )

    @router.get(ROUTE + "/{run}/{kind}/{name}/{file:path}")
    def download(
        run: str, kind: str, name: str, file: str, tenant: str = "", expires: str = "", signature: str = ""
    ) -> Response:
        path = CheckpointPath(run, kind, name)
        links.check(tenant, path, file, expires, signature)
        if tenant not in tenants.names:
            raise RequestError(f"{path} does not exist, or has expired", status=404)
        with ExitStack() as pinned:
            folder = store.pin(tenant, path)
            pinned.callback(store.unpin, path)
            files = store.files(path)
            if file == ARCHIVE and file not in files:
                inside = {shown: _plain_file(folder, found) for shown, found in adapter_files(path, files).items()}
                created = store.find(tenant, path).created
                headers = {
                    "Content-Length": str(tar_bytes(inside, created)),
                    "Content-Disposition": f'attachment; filename="{path.name}.tar"',
                }
                tar = StreamingResponse(tar_of(inside, created), media_type="application/x-tar", headers=headers)
                return _Reading(tar, pinned.pop_all())
            if file not in files:
                raise RequestError(f"{path} has no file of that name", status=404)
            content = FileResponse(_plain_file(folder, file), media_type="application/octet-stream")
            return _Reading(content, pinned.pop_all())


def _add_sessions(router: APIRouter, store: CheckpointStore, caller: Any) -> None:
    registry = store.registry

    @router.get("/api/v1/sessions")
    def sessions(tenant: caller, limit: str = "20", offset: str = "0", access_scope: str = "owned") -> Response:
        _check_scope(access_scope)
        part, _ = answers.page(registry.sessions.of(tenant.name), _number("limit", limit), _number("offset", offset))
        return _json(types.ListSessionsResponse(sessions=[session.id for session in part]))

    @router.post("/api/v1/sessions/search")
    async def search(request: Request, tenant: caller) -> Response:
        body = await _body(request, tuple(types.SessionSearchRequest.model_fields))
        try:
            wanted = types.SessionSearchRequest.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'the search'}: {first['msg']}") from None
        return _json(await run_in_threadpool(_search, store, tenant.name, wanted))

    @router.get("/api/v1/sessions/{session}")
    def session_of(tenant: caller, session: str, access_scope: str = "owned") -> Response:
        _check_scope(access_scope)
        found = registry.sessions.get(tenant.name, session)
        return _json(
            types.GetSessionResponse(
                training_run_ids=[run.id for run in registry.runs.of(tenant.name) if run.session == session],
                sampler_ids=[sampler.id for sampler in registry.samplers.of(tenant.name) if sampler.session == session],
                user_metadata=answers.as_texts(found.user_metadata),
                display_name=found.display_name,
            )
        )

    @router.put("/api/v1/sessions/{session}/project")
    async def assign_project(request: Request, tenant: caller, session: str) -> Response:
        project = (await _body(request, ("project_id",))).get("project_id")
        if not isinstance(project, str) or not 0 < len(project) <= 128:
            raise RequestError("project_id must be a text of 1 to 128 characters")
        await run_in_threadpool(registry.sessions.change, tenant.name, session, project_id=project)
        return Response(status_code=204)

    @router.get("/api/v1/sessions/{session}/trace_export")
    def trace_export(tenant: caller, session: str) -> Response:
        registry.sessions.get(tenant.name, session)
        _refuse("trace_export")

    @router.get("/api/v1/samplers/{sampler}")
    def sampler_of(tenant: caller, sampler: str) -> Response:
        found = registry.samplers.get(tenant.name, sampler)
        return _json(types.GetSamplerResponse(sampler_id=found.id, base_model=found.base_model, model_path=found.model_path))


def _add_accounts(router: APIRouter, caller: Any) -> None:
    @router.get("/api/v1/auth/apikey/me")
    def own_key(tenant: caller) -> Response:
        details = {"org_details": {"name": "megarl"}, "user_details": {"email": tenant.name}}
        content = {"key_id": 0, "name": tenant.name, "note": "a key of this server's file of tenants", "details": details}
        return Response(json.dumps(content), media_type="application/json")

    @router.delete("/api/v1/auth/apikey/me")
    def delete_own_key(tenant: caller) -> Response:
        raise RequestError(
            f"the key of {tenant.name} is in this server's file of tenants; only its operator removes it", status=403
        )

    @router.get("/api/v1/audit")
    def audit(tenant: caller) -> Response:
        _refuse("audit")

    @router.get("/api/v1/billing/{what:path}")
    def billing(tenant: caller, what: str) -> Response:
        _refuse(f"billing/{what:.60}")


def _search(store: CheckpointStore, tenant: str, wanted: types.SessionSearchRequest) -> types.SessionSearchResponse:
    registry, now = store.registry, store.clock()
    found = answers.found_sessions(wanted, registry.sessions.of(tenant), f"megarl:tenant:{tenant}", now)
    shown = found[: wanted.limit]
    sessions = {run.id: run.session for run in registry.runs.of(tenant)}
    sizes: dict[str, list[int]] = {}
    for info in store.listed(tenant):
        sizes.setdefault(sessions.get(info.path.run, ""), []).append(info.bytes)
    summaries = [
        types.SessionSummary(
            session_id=session.id,
            created_at=answers.moment(session.created),
            owner=tenant,
            project_id=session.project_id,
            status=answers.status_answer(session, now),  # type: ignore[arg-type]
            checkpoints_count=len(sizes.get(session.id, ())),
            display_name=session.display_name,
            user_metadata=answers.as_texts(session.user_metadata),
            checkpoint_storage_bytes=sum(sizes.get(session.id, ())),
        )
        for session in shown
    ]
    last = shown[-1] if len(found) > len(shown) else None
    cursor = types.SessionSearchCursor(last_created_at=answers.moment(last.created), last_session_id=last.id) if last else None
    return types.SessionSearchResponse(sessions=summaries, next_cursor=cursor)


async def _body(request: Request, names: tuple[str, ...]) -> dict[str, Any]:
    """The JSON object of a small body, which has no other fields than `names`."""
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > MOST_BODY_BYTES:
            raise RequestError(
                f"the body has more than {MOST_BODY_BYTES} bytes, which is more than this route takes", status=413
            )
    try:
        body = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        raise RequestError("the body must be a JSON object") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if unknown := sorted(set(body) - set(names)):
        raise RequestError(f"the body has the unknown field {unknown[0]!r:.80}; fields are {', '.join(names)}")
    return body


def _plain_file(folder: Path, name: str) -> Path:
    """A file below `folder`, which no link leads to.

    Raises:
        RequestError: there is none.
    """
    found = folder / name
    steps = (found, *found.parents)[: len(Path(name).parts)]
    if any(step.is_symlink() for step in steps) or not found.is_file():
        raise RequestError(f"the file {name!r} of the checkpoint cannot be read")
    return found


def _number(field: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,17}", text):
        raise RequestError(f"{field} is {text!r:.40}; it must be a whole number")
    return int(text)


def _check_scope(scope: str) -> None:
    if scope not in ("owned", "accessible"):
        raise RequestError(f"access_scope is {scope!r:.40}; it must be 'owned' or 'accessible'")


def _refuse(what: str) -> NoReturn:
    raise RequestError(f"this server, megarl serve, has no {what}; the hosted service alone has it", status=404)


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
