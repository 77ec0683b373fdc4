"""`megarl serve`: from a config to a server that answers, and back to none. What starts threads is imported after the fork."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megarl.config import AnyConfig, Config, parse_config
from megarl.config.yaml_tree import apply_overrides, read_yaml
from megarl.errors import ClusterError, ConfigError, RunStopped
from megarl.options.serve.section import ServeConfig, serve_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from megarl.core.session import Session
    from megarl.options.serve.server_run import ServerRun

PACKAGES = ("tinker", "fastapi", "uvicorn")
LOCAL_KEY = "tml-local"
"""A key for a server without tenants, which takes any that the client does not refuse itself."""


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read the config of a server; its section `serve` may be left out, and so may rows and rewards.

    Raises:
        ConfigError: one sentence, as from `load_config`; or a package is not installed.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"megarl serve needs the package {missing[0]}, which is not installed: pip install 'megarl[serve]'")
    tree = apply_overrides(read_yaml(path), overrides)
    tree["serve"] = {} if tree.get("serve") is None else tree["serve"]
    return parse_config(tree)


def new_key(config: Config, name: str) -> str:
    """Make the key of a new tenant, whose hash goes to the file `serve.tenants`; returns what its operator reads.

    Raises:
        ConfigError: the config names no file, the name is none, or the file has that tenant.
    """
    from megarl.options.serve.tenants import add_tenant

    serve = _serve_of(config)
    if serve.tenants is None:
        raise ConfigError("--new-key needs a file of tenants: set serve.tenants, such as to tenants.yaml")
    return add_tenant(Path(serve.tenants), name)


def serve(config: AnyConfig, say: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; models are then kept as they are, and the next server in this folder has them.

    Raises:
        OwnerError: another process that is alive has the folder.
        MegarlError: anything else that the user can mend.
        WorkerError, DeadlineError: ranks were lost; whoever supervises starts the server again.
    """
    from megarl.options.serve.server_run import ServerRun
    from megarl.runs.owner import owned

    say = say or partial(print, flush=True)
    of_server = cast(Config, config)  # `load` gives no other
    with owned(config):
        run = ServerRun(of_server, say)
        error: BaseException = RunStopped("the server was told to stop")
        try:
            _serve(of_server, run, say)
        except BaseException as raised:
            error = raised
            raise
        finally:
            run.close(error)


def _serve(config: Config, run: ServerRun, say: Callable[[str], None]) -> None:
    from megarl.options.serve.http_server import HttpServer
    from megarl.system.socket_names import NOTHING, SocketName

    settings = _serve_of(config)
    listening = bound(settings, run.folder / "serve" / "port")
    port = listening.getsockname()[1]
    with ExitStack() as stack:
        stack.callback(listening.close)
        stack.enter_context(closing(SocketName(port, "server of models", "a tenant's key" if settings.tenants else NOTHING)))
        is_down = threading.Event()
        server = HttpServer(settings, run.figures, is_down)
        stack.callback(is_down.set)
        with run.phases("start"):
            say(f"{config.run_folder}: reading the tokenizer, starting ranks and engines")
            session = stack.enter_context(_session(config, run, say))
            run.open_samples(session.inputs.tokenizer)
            app, sampler = _app(config, session, run, server.lost, say)
        with run.phases.step():
            pass  # from here on a failure is none of the config's
        run.watch()
        say(_welcome(settings, port))
        with run.phases("serve"):
            asyncio.run(server.answer(app, sampler, listening))


def _session(config: Config, run: ServerRun, say: Callable[[str], None]) -> Session:
    from megarl.core.session import Session
    from megarl.runs.training_side import POLICY
    from megarl.trainers.inputs import read_inputs
    from megarl.trainers.rl.train import start_processes

    with ExitStack() as stack:
        inputs = read_inputs(config, train=False)
        stack.callback(inputs.close)
        session = Session(config, inputs, start_processes)
        stack.callback(session.close)

        def placed(placement: Any) -> None:
            run.marks.note(gpus=placement.gpu_count)
            check_seen(run.folder, placement.machines)

        session.start(run.folder / "logs", say=say, placed=placed)
        session.at_close(inputs.close)
        stack.pop_all()
    run.marks.note(gpu=session.roles.device)
    run.state.engines = session.rollouts.engine_status
    run.state.ranks = {POLICY: session.roles.groups[POLICY].states}
    return session


def check_seen(folder: Path, machines: Collection[str]) -> None:
    """Refuse a server on several machines of which one does not see the run's folder, where engines read what they sample with.

    Raises:
        ClusterError: that is so.
    """
    from megarl.workers.node_folders import machines_without

    if len(machines) > 1 and (without := machines_without(folder, machines)):
        raise ClusterError(
            f"run.folder has '{folder}', which machine {without[0]} does not see, and engines read adapters there; let "
            "run.folder be on a file system that all machines of a server see"
        )


def _app(
    config: Config, session: Session, run: ServerRun, lost: Callable[[BaseException], None], say: Callable[[str], None]
) -> tuple[FastAPI, Any]:
    """The application of a started session, and the sampler that is to be closed at its end."""
    from megarl.options.serve.app import build_app
    from megarl.options.serve.custom_graph import read_graph
    from megarl.options.serve.figures import CountedSampler, CountedTrainer
    from megarl.options.serve.journal import RequestJournal
    from megarl.options.serve.sampler import open_sampler
    from megarl.options.serve.served_pictures import open_pictures
    from megarl.options.serve.service import Service
    from megarl.options.serve.settings import ServiceOptions
    from megarl.options.serve.store import open_store
    from megarl.options.serve.tenants import Tenants, kept_secret
    from megarl.options.serve.trainer import SessionTrainer

    settings, figures, folder = _serve_of(config), run.figures, run.folder / "serve"
    tenants = Tenants(Path(settings.tenants) if settings.tenants else None, secret=kept_secret(folder / "secret"), say=say)
    for left in (folder / "models", folder / "pictures"):  # what a server that was killed had moved out of memory, and kept
        shutil.rmtree(left, ignore_errors=True)
    shown = [open_pictures(config, session.inputs.tokenizer, kept_in) for kept_in in (None, folder / "pictures")]
    trainer = SessionTrainer(session, folder / "models", live=settings.live_models, pictures=shown[0])
    sampler = open_sampler(session, shown[1])
    options = ServiceOptions(
        models=dict.fromkeys(settings.models, settings.context_tokens),
        context_tokens=settings.context_tokens,
        max_rank=settings.max_rank,
        live_models=settings.live_models,
        full_weights=settings.full_weights,
        max_body_bytes=settings.max_body_bytes,
        max_step_bytes=settings.max_step_bytes,
        max_waiting=settings.max_waiting,
        snapshot_every_s=settings.snapshot_every_s,
        model_idle_s=settings.idle_session_s,
        scratch=folder / "scratch",
        read_graph=read_graph,
        answered=run.samples.take,
        say=say,
    )
    service = Service(
        options,
        trainer=CountedTrainer(trainer, figures, lost),
        sampler=CountedSampler(sampler, figures),
        store=open_store(folder, say=say),
        tenants=tenants,
        journal=RequestJournal(folder / "journal"),
    )
    figures.tenant_of = service.tenant_of_model
    return build_app(service), sampler


def bound(settings: ServeConfig, kept: Path | None = None) -> socket.socket:
    """A socket that has its address and does not listen yet, so that a taken port is said before a model is loaded.

    `kept` is a file for a port that was free: a server that is started again has the port at which its clients look for it,
    unless another program took it meanwhile.

    Raises:
        ConfigError: it cannot have that address.
    """
    if settings.port or kept is None:
        return _bound_at(settings, settings.port)
    before = kept.read_text() if kept.exists() else ""
    made = None
    if before.isdecimal() and int(before) < 1 << 16:
        with suppress(ConfigError):
            made = _bound_at(settings, int(before))
    made = made or _bound_at(settings, 0)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(str(made.getsockname()[1]))
    return made


def _bound_at(settings: ServeConfig, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, port))
    except OSError as error:
        made.close()
        at = f"{settings.host}:{port}"
        raise ConfigError(
            f"serve.port is {port}, but {at} cannot be listened on ({error.strerror or error}); choose another "
            "serve.port or serve.host, or port 0 for a free one"
        ) from None
    return made


def _welcome(settings: ServeConfig, port: int) -> str:
    scheme, host = "https" if settings.tls_certificate else "http", settings.host
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    what = f"all weights of {next(iter(settings.models))}" if settings.full_weights else ", ".join(settings.models)
    key = "a key of serve.tenants" if settings.tenants else LOCAL_KEY
    return f"serving {what} at {url}: clients set TINKER_BASE_URL={url} and TINKER_API_KEY={key}; Ctrl-C ends it"


def _serve_of(config: Config) -> ServeConfig:
    settings = serve_of(config)
    assert settings is not None, "`load` sees to it"
    return settings
