"""Records and checkpoints as the types of the client, for its REST routes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError
from tinker import types
from tinker.types.session_status import SessionStatus

from megarl.options.serve.places import KINDS
from megarl.options.serve.registry import ServedRun, SessionRecord, as_texts
from megarl.options.serve.store import CheckpointInfo
from megarl.options.serve.values import RequestError

SILENT_S = 60.0
"""Seconds without a heartbeat, sent every 10 s, after which a session is not known to be running."""
MOST_PER_PAGE = 1_000
_STATUS: TypeAdapter[Any] = TypeAdapter(SessionStatus)


def checkpoint_answer(info: CheckpointInfo) -> types.Checkpoint:
    """A checkpoint as clients see it."""
    return types.Checkpoint(
        checkpoint_id=f"{info.path.kind}/{info.path.name}",
        checkpoint_type=KINDS[info.path.kind],  # type: ignore[arg-type]
        time=moment(info.created),
        tinker_path=info.path.text,
        size_bytes=None if info.damage else info.bytes,
        public=info.public,
        user_metadata=as_texts(info.user_metadata),
        expires_at=None if info.expires is None else moment(info.expires),
    )


def run_answer(run: ServedRun, checkpoints: Sequence[CheckpointInfo]) -> types.TrainingRun:
    """A training run as clients see it; `checkpoints` are its own, the newest first."""

    def newest(kind: str) -> types.Checkpoint | None:
        return next((checkpoint_answer(info) for info in checkpoints if info.path.kind == kind), None)

    return types.TrainingRun(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=run.tenant,
        is_lora=run.rank is not None,
        corrupted=run.corrupted,
        lora_rank=run.rank,
        last_request_time=moment(max(run.created, run.last_seen)),
        last_checkpoint=newest("weights"),
        last_sampler_checkpoint=newest("sampler_weights"),
        user_metadata=as_texts(run.user_metadata),
    )


def weights_answer(info: CheckpointInfo) -> types.WeightsInfoResponse:
    """Facts that a client must know to load a checkpoint."""
    made = info.made
    rank = made.get("rank")
    switches = {name: made.get(name) for name in ("train_attn", "train_mlp", "train_unembed")} if rank is not None else {}
    return types.WeightsInfoResponse(
        base_model=str(made.get("base_model", "")),
        is_lora=rank is not None,
        lora_rank=rank,
        optimizer_config=made.get("optimizer") or types.AdamOptimizerConfig(),  # type: ignore[arg-type]
        **switches,
    )


def status_answer(session: SessionRecord, now: float) -> dict[str, Any] | None:
    """The protocol's status of a session: as it ended, `active`, or None where neither is known."""
    if session.status is not None:
        try:
            return _STATUS.validate_python(dict(session.status)).model_dump(mode="json")
        except ValidationError:
            return None
    return {"type": "active"} if now - max(session.created, session.last_seen) < SILENT_S else None


def page(entries: Sequence[Any], limit: int, offset: int) -> tuple[Sequence[Any], types.Cursor]:
    """A page of a list, and where it is.

    Raises:
        RequestError: `limit` or `offset` are below 0, or `limit` is too large.
    """
    if not 0 <= limit <= MOST_PER_PAGE:
        raise RequestError(f"limit is {limit}; it must be 0 to {MOST_PER_PAGE}")
    if offset < 0:
        raise RequestError(f"offset is {offset}; it must be 0 or more")
    return entries[offset : offset + limit], types.Cursor(offset=offset, limit=limit, total_count=len(entries))


def moment(seconds: float) -> datetime:
    """Seconds since 1970 as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def found_sessions(
    request: types.SessionSearchRequest, sessions: Sequence[SessionRecord], own: str, now: float
) -> list[SessionRecord]:
    """The sessions of one tenant, the newest first, that a search asks for, behind its cursor. `own`: the tenant's URN."""
    if request.owner.type == "user" and own not in request.owner.owner_urns:
        return []
    return [session for session in sessions if _is_behind(session, request) and _is_found(session, request, now)]


def _is_behind(session: SessionRecord, request: types.SessionSearchRequest) -> bool:
    cursor = request.cursor
    if cursor is None:
        return True
    created, last = moment(session.created), cursor.last_created_at
    return created < last or (created == last and session.id > cursor.last_session_id)


def _is_found(session: SessionRecord, request: types.SessionSearchRequest, now: float) -> bool:
    names = []
    if request.session_id is not None:
        names.append(session.id == request.session_id)
    if request.display_name is not None:
        name = (session.display_name or "").lower()
        names.append(all(word in name for word in request.display_name.lower().split()))
    metadata = as_texts(session.user_metadata) or {}
    return (
        (not names or any(names))
        and (request.project_ids is None or session.project_id in request.project_ids)
        and all(metadata.get(key) == value for key, value in request.user_metadata.items())
        and (request.statuses is None or any(_has_status(session, query, now) for query in request.statuses))
    )


def _has_status(session: SessionRecord, query: Any, now: float) -> bool:
    status = status_answer(session, now)
    if status is None or status["type"] != query.type:
        return False
    reasons = getattr(query, "reasons", None)
    return reasons is None or status.get("reason", {}).get("type") in reasons
