"""The routes and types that the installed client has in its source are those that the app answers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from fastapi import FastAPI
from starlette.routing import Match

from megarl.options.serve.app import build_app
from megarl.options.serve.service import Service
from megarl.options.serve.settings import ServiceOptions
from megarl.options.serve.store import open_store
from megarl.options.serve.tenants import Tenants

CLIENT = Path(tinker.__file__).parent
HTTP_METHODS = {"get": "GET", "post": "POST", "put": "PUT", "delete": "DELETE", "patch": "PATCH"}
ANSWERED_BY = {
    "create_model": "CreateModelRequest",
    "create_session": "CreateSessionRequest",
    "session_heartbeat": "SessionHeartbeatRequest",
    "create_sampling_session": "CreateSamplingSessionRequest",
    "join_sampling_session": "JoinSamplingSessionRequest",
    "create_custom_loss": "CreateCustomLossRequest",
    "get_info": "GetInfoRequest",
    "asample": "SampleRequest",
    "forward_backward": "ForwardBackwardRequest",
    "optim_step": "OptimStepRequest",
    "save_weights": "SaveWeightsRequest",
    "load_weights": "LoadWeightsRequest",
    "save_weights_for_sampler": "SaveWeightsForSamplerRequest",
    "save_weights_external": "SaveWeightsExternalRequest",
    "copy_weights": "CopyWeightsRequest",
    "retrieve_future": "FutureRetrieveRequest",
    "retrieve_futures": "FuturesRetrieveRequest",
    "client/config": "ClientConfigRequest",
    "client/dynamic_config": "ClientConfigRequest",
    "telemetry": "TelemetrySendRequest",
    "sessions/search": "SessionSearchRequest",
}
WITHOUT_ROUTE = {
    "UnloadModelRequest": "no method of the client sends it; the app has the route",
    "ForwardRequest": "forward passes are sent as forward_backward",
    "GetBillingUsageRequest": "parameters of GET billing/usage/events, answered by an error",
    "GetCurrentCheckpointStorageUsageRequest": "parameters of GET billing/usage/checkpoints/current, answered by an error",
}


def calls() -> Iterator[tuple[str, str]]:
    """Method and path of every call of the client, `x` for what it fills in."""
    for file in sorted(CLIENT.rglob("*.py")):
        if file.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = node.func.attr.removeprefix("_")
            method = HTTP_METHODS.get(name)
            if name == "request" and len(node.args) > 1 and isinstance(node.args[0], ast.Constant):
                method, node.args = str(node.args[0].value), node.args[1:]
            if method is None or not node.args:
                continue
            text = ast.unparse(node.args[0])
            found = re.fullmatch(r"f?['\"](/api/v1/.*)['\"]", text)
            if found:
                yield method, re.sub(r"\{[^}]*\}", "x", found[1].replace("{checkpoint_id}", "weights/x"))


def literals() -> set[str]:
    """Every text with a route in the client's source that is no documentation."""
    found = set()
    for file in CLIENT.rglob("*.py"):
        if file.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/api/v1/"):
                found.add(node.value)
    return found


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    folder = tmp_path_factory.mktemp("routes")
    options = ServiceOptions(models={"base": 8}, scratch=folder / "scratch")
    service = Service(options, trainer=None, sampler=None, store=open_store(folder), tenants=Tenants())  # type: ignore[arg-type]
    return build_app(service)


def is_routed(app: FastAPI, method: str, path: str) -> bool:
    """Whether the app has a route for it."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)


def test_the_app_has_a_route_for_everything_that_the_client_calls(app: FastAPI) -> None:
    found = {*calls()}
    assert len(found) > 35, "calls were not found"
    paths = {path for _, path in found}
    unseen = {text for text in literals() if not any(path.startswith(text) for path in paths)}
    assert unseen == set(), "the source has routes whose calls were not found"
    assert [call for call in sorted(found) if not is_routed(app, *call)] == []


def test_the_rule_on_routes_sees_one_that_is_missing(app: FastAPI) -> None:
    assert not is_routed(app, "POST", "/api/v1/forward_sideways")
    assert not is_routed(app, "GET", "/api/v1/forward_backward")


def test_every_request_type_of_the_client_is_one_that_the_server_knows() -> None:
    found = set()
    for file in (CLIENT / "types").rglob("*_request.py"):
        found |= {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)}
    requests = {name for name in found if name.endswith("Request")}
    assert len(requests) > 20, "types were not found"
    assert requests == {*ANSWERED_BY.values(), *WITHOUT_ROUTE}
    assert {path.removeprefix("/api/v1/") for path in literals()} >= {*ANSWERED_BY}


def test_flags_that_the_server_sets_are_flags_that_the_client_has(app: FastAPI) -> None:
    from tinker.types.client_config_response import ClientConfigResponse
    from tinker.types.client_dynamic_config_response import ClientDynamicConfigResponse

    service = app.state.service
    assert {*service.client_config()} <= {*ClientConfigResponse.model_fields}
    assert {*service.dynamic_config()} <= {*ClientDynamicConfigResponse.model_fields}
