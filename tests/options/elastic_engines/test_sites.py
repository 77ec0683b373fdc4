"""Engines of other sites in the real scheduler, over HTTP on this machine: they come, work, leave or are lost.

The engines are of the tests' own; what `megarl node join` runs, and the run's side, are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.cli import main
from megarl.errors import ConfigError, EngineError, MegarlError, WorkerError
from megarl.options.elastic_engines import requests
from megarl.options.elastic_engines.section import SitesConfig
from megarl.options.elastic_engines.sites import far_members, gate, joining
from megarl.options.elastic_engines.sites.far_engine import FarEngine
from megarl.options.elastic_engines.sites.far_members import FarMembers
from megarl.options.elastic_engines.sites.joining import SiteSettings, join
from megarl.options.elastic_engines.sites.model_facts import model_facts, refusal
from megarl.options.elastic_engines.sites.wire import (
    Joining,
    ModelFacts,
    Order,
    Poll,
    SentResponse,
    SiteFacts,
    checked_responses,
    read_request,
    read_response,
    sent_request,
    sent_response,
)
from megarl.rollout.engines.protocol import Engine, EngineRequest, Generation, SamplingParams
from megarl.system import bearer_tokens
from megarl.version import __version__
from tests.options.elastic_engines.test_members import WAIT_S, Site
from tests.options.elastic_engines.test_members import site as site  # a fixture
from tests.options.lending.test_lent_engines import told_and_kept
from tests.rollout.fake_engines import Source, check_prompts
from tests.rollout.test_partial_groups import ContinuingEngine, check_sample

pytest.importorskip("zstandard")
TIMES, SLOW_S = 10, 0.5
TOKEN = "a-token-of-this-test"


def model_in(folder: Path, value: float = 1.0) -> Path:
    """A folder that looks like a model's."""
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10**9, "model_type": "llama", "transformers_version": "1"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    save_file({"w": torch.full((4, 3), value), "b": torch.arange(5.0)}, folder / "model.safetensors")
    return folder


# what goes over the wire ----------------------------------------------------------------------------------------------


def test_requests_and_responses_arrive_as_they_were_sent() -> None:
    begun = Generation([7, 8], [-0.1, -1 / 3], [2, 3], "abort")
    params = SamplingParams(9, temperature=0.7, top_p=0.9, stop=("\n\n",), stop_token_ids=(5,), cut_token_ids=(6,))
    request = EngineRequest([[1, 2], [3]], params, n=2, keys=["a", "b"], deadline_s=3.5, begun=[[begun, None], [None, None]])
    coded = joining.msgspec.json.encode(sent_request(request))
    assert read_request(joining.msgspec.json.decode(coded, type=type(sent_request(request)))) == request
    assert read_response(sent_response(begun)) == begun
    with pytest.raises(EngineError, match="no columns of options"):
        sent_request(EngineRequest([[1]], SamplingParams(1, extra=frozenset({"routing"}))))


GOOD = SentResponse([7, 8, 9], [-0.5, -0.5, 0.0], [1, 1, 2], "stop")


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([[GOOD]], "another number of responses"),
        ([[GOOD, GOOD], [GOOD, GOOD]], "another number of responses"),
        ([[GOOD, SentResponse([1] * 5, [0.0] * 5, [1] * 5, "length")]], "too long"),
        ([[SentResponse([8, 7], [0.0] * 2, [1] * 2, "stop"), GOOD]], "does not go on from what it was given"),
        ([[GOOD, SentResponse([100], [0.0], [1], "stop")]], "not below 100"),
        ([[GOOD, SentResponse([-1], [0.0], [1], "stop")]], "not below 100"),
        ([[GOOD, SentResponse([1], [0.5], [1], "stop")]], "a log-prob that is none"),
        ([[GOOD, SentResponse([1], [float("nan")], [1], "stop")]], "a log-prob that is none"),
        ([[GOOD, SentResponse([1, 2], [0.0], [1], "stop")]], "different lengths"),
    ],
)
def test_answers_that_cannot_have_been_sampled_are_refused(responses: Any, message: str) -> None:
    begun = [[Generation([7], [-0.5], [1], "abort"), None]]
    request = EngineRequest([[1]], SamplingParams(4), n=2, begun=begun)
    assert len(checked_responses(request, [[GOOD, GOOD]], 100)[0]) == 2
    with pytest.raises(EngineError, match=message):
        checked_responses(request, responses, 100)


# the same model -------------------------------------------------------------------------------------------------------


def test_a_copy_of_the_model_in_other_files_is_the_same_model(tmp_path: Path) -> None:
    here, there = model_in(tmp_path / "a"), model_in(tmp_path / "b")
    (there / "model.safetensors").unlink()
    save_file({"w": torch.full((4, 3), 1.0)}, there / "model-2.safetensors")
    save_file({"b": torch.arange(5.0)}, there / "model-1.safetensors")
    config = json.loads((there / "config.json").read_text()) | {"transformers_version": "2", "_name_or_path": "x"}
    (there / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert model_facts(here) == model_facts(there)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").write_text('{"vocab_size": 3}'), "config.json of the model here is not"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json of the model here is not the run's"),
        (lambda folder: (shutil.rmtree(folder), model_in(folder, 2.0)), "weights of the model here are not the run's"),
    ],
)
def test_another_model_is_refused_in_a_sentence(tmp_path: Path, change: Callable[[Path], Any], message: str) -> None:
    folder = model_in(tmp_path / "m")
    facts = SiteFacts(__version__, model_facts(folder), "m", "embedded", {}, 1)
    assert refusal(__version__, model_facts(folder), facts) is None
    assert (
        refusal("0.0.1", facts.model, facts)
        == f"megarl here is 0.0.1, the run's is {__version__}: install megarl {__version__}"
    )
    change(folder)
    why = refusal(__version__, model_facts(folder), facts)
    assert why is not None
    assert message in why


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused_in_a_sentence(tmp_path: Path, missing: str) -> None:
    folder = model_in(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(MegarlError, match=r"cannot be read as|has no \*\.safetensors"):
        model_facts(folder)
    (folder / missing).write_bytes(b"\xff" * 40)
    with pytest.raises(MegarlError, match=r"cannot be read as|is no safetensors file"):
        model_facts(folder)


# a run and its sites --------------------------------------------------------------------------------------------------


class FarKind(Engine):
    """An engine at the other site that samples as `ContinuingEngine` does; its weights are what came last."""

    made: list[FarKind] = []  # noqa: RUF012 - of all tests, and emptied by each
    book: Any = None
    seconds = 0.3

    def __init__(self, model_path: str, *, initial_version: int | None = None, **options: Any) -> None:
        self.inner = ContinuingEngine("far", FarKind.book, lambda: FarKind.seconds)  # type: ignore[arg-type]
        self.inner.version, self.options = None, options
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = self.is_stopped = False
        FarKind.made.append(self)

    @property
    def weight_version(self) -> int | None:
        return self.inner.version

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        if self.fails:
            raise EngineError("it is out of memory")
        return await self.inner.generate(request)

    async def cut(self, keys: Any) -> None:
        await self.inner.cut(keys, deadline_s=1.0)

    async def health(self) -> None:
        """It is well."""

    async def stop(self) -> None:
        self.is_stopped = True

    async def begin_update(self, version: int, base: int | None = None) -> None:
        self.inner.version = None

    async def apply_update(self, bucket: Any) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in bucket}

    async def end_update(self, version: int, checksums: Any = None) -> None:
        self.inner.version = version

    async def abandon_update(self) -> None:
        """Its weights stay of no version."""


class FarSite:
    """`megarl node join` in a thread, from here until it ends."""

    def __init__(self, url: str, model: Path, token: str = TOKEN, patience_s: float = 5.0) -> None:
        self.said: list[str] = []
        self.error: Exception | None = None
        self._leave: Callable[[], None] = lambda: None
        self._settings = SiteSettings(url, token, "site-b", patience_s, self.said.append)
        self._model, self._loop = model, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._task = self._loop.create_task(join(self._settings, self._on_signal, lambda _: str(self._model)))
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self.error = error

    def _on_signal(self, callback: Callable[[], None]) -> None:
        self._leave = callback

    def leave(self) -> None:
        """As Ctrl-C does."""
        self._loop.call_soon_threadsafe(self._leave)
        self.wait()

    def vanish(self) -> None:
        """End without a word."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self.wait()

    def wait(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), self.said


class TwoSites:
    """A run that sites may join, and those that did."""

    def __init__(self, site: Site, far: FarMembers, model: Path) -> None:
        self.site, self.far, self.model, self.sites = site, far, model, list[FarSite]()
        self.url = f"http://127.0.0.1:{far._gate.port}"

    def come(self, **changes: Any) -> FarSite:
        self.sites.append(FarSite(self.url, self.model, **changes))
        self.wait_until(lambda: len(self.site.there) == 2)
        return self.sites[-1]

    def wait_until(self, there: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + WAIT_S
        while not there():
            assert time.monotonic() < ends_at, (self.site.said, [one.said for one in self.sites], [s.error for s in self.sites])
            time.sleep(0.005)

    def may_wait_for_work(self) -> None:
        """Wait until the newest engine works on something; not for long, as others may have taken all there is."""
        ends_at = time.monotonic() + 2.0
        while not self.site.there[-1].requests and time.monotonic() < ends_at:
            time.sleep(0.005)


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: differences are small."""
    torch.manual_seed(0)
    return {"w": torch.randn(64, 32) + version * (torch.rand(64, 32) < 0.1) * 2**-10, "b": torch.arange(5.0)}


@pytest.fixture
def two(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoSites]:
    model = model_in(tmp_path / "model")
    for module, name, value in [
        (far_members, "SILENT_S", 3.0), (gate, "LONGEST_POLL_S", 0.2), (far_members, "check_engine", lambda *_: FarKind),
        (joining, "load_engine", lambda _: FarKind), (joining, "ModelTexts", lambda _: None), (joining, "RETRY_S", 0.05),
        (FarMembers, "_weights_of", lambda self, number, version: iter(weights_of(version).items())),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv(gate.TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(FarKind, "made", [])
    monkeypatch.setattr(FarKind, "book", site.book)
    rollout = site.config.rollout.model_copy(update={"sites": SitesConfig(port=0)})
    described = site.config.model.model_copy(update={"path": str(model)})
    config = site.config.model_copy(update={"rollout": rollout, "model": described})
    site.running._far = far = FarMembers(config, site, 2, site.running._members.keys, site.said.append)  # type: ignore[arg-type]
    site.made[0].seconds = lambda: SLOW_S  # so that there is something left for who comes
    made = TwoSites(site, far, model)
    yield made
    for one in made.sites:
        if one._thread.is_alive():
            one.vanish()


def batch(two: TwoSites, version: int) -> list[int]:
    """Take the batch that is due; returns the numbers of its groups."""
    groups = two.site.batch()
    for sample in (sample for group in groups for sample in group):
        check_sample(sample, two.site.book)
        assert version - 1 <= sample.weight_versions[0] <= sample.weight_versions[-1] <= version
    return [int(group[0].group_id[1:]) for group in groups]


@pytest.mark.slow
def test_engines_of_another_site_come_and_go_ten_times_and_every_prompt_is_trained_once(two: TwoSites) -> None:
    site, source, seen = two.site, Source(), list[int]()
    ways: list[Callable[[FarSite], None]] = [FarSite.leave, lambda one: asked_to_leave(two, one), FarSite.vanish]
    for version in range(2 * TIMES + 2):
        site.update(version)
        site.scheduler.open_step(version, source)
        if version % 2 == 1 and version < 2 * TIMES:
            two.come()
            two.wait_until(lambda version=version: two.site.there[-1].version == version)  # type: ignore[misc]
        elif version and len(site.there) == 2:
            two.may_wait_for_work()
            ways[version // 2 % 3](two.sites[-1])
            two.wait_until(lambda: len(site.there) == 1)
        seen += batch(two, version)
        assert site.scheduler.partial.aborted_tokens == 0
    check_prompts(site.scheduler, source, seen, len(seen))
    assert len(FarKind.made) == TIMES
    assert sum(bool(engine.inner.answered) for engine in FarKind.made) > 2
    assert all(engine.is_stopped for engine in FarKind.made)
    assert site.scheduler.manager.suspended > 0, "some was handed over"
    assert [one.error for one in two.sites] == [None] * TIMES


def asked_to_leave(two: TwoSites, one: FarSite) -> None:
    """By `megarl node leave RUN site-b`."""
    assert main(["node", "leave", str(two.site.config.run_folder), "site-b"]) == 0
    one.wait()
    assert "left: it has handed over what it worked on" in one.said[-1]


def test_weights_come_as_differences_and_are_those_of_the_version(two: TwoSites) -> None:
    site, source = two.site, Source()
    for version in range(4):
        site.update(version)
        site.scheduler.open_step(version, source)
        if version == 0:
            one = two.come()
        two.wait_until(lambda version=version: site.there[-1].version == version)  # type: ignore[misc]
        [engine] = FarKind.made
        assert engine.weight_version == version
        assert all(torch.equal(engine.weights[name], tensor) for name, tensor in weights_of(version).items())
        batch(two, version)
    said = [line for line in one.said if line.startswith("weights")]
    assert [line.partition(":")[0].split(" from ")[0] for line in said] == [
        "weights of version 0 whole", *(f"weights of version {v} as differences" for v in (1, 2, 3))
    ]  # fmt: skip
    told = two.far.told()[0]
    assert 0 < told["difference_bytes"] < told["full_bytes"]
    one.leave()
    assert "B of differences and" in one.said[-1]


def test_a_difference_that_does_not_fit_is_followed_by_all_weights(two: TwoSites) -> None:
    site, source = two.site, Source()
    site.update(0)
    site.scheduler.open_step(0, source)
    one = two.come()
    newest = two.far.store.newest
    assert newest is not None
    wrong = [e if e.name != "w" else joining.msgspec.structs.replace(e, checksum="0" * 32) for e in newest.tensors]
    two.far.store.newest = joining.msgspec.structs.replace(newest, tensors=wrong)
    index_of, spoilt = two.far.store.add, list[int]()

    def spoil(version: int, tensors: Any) -> Any:
        index = index_of(version, tensors)
        path = two.far.store.path(version, "difference")
        assert path is not None
        path.write_bytes(path.read_bytes()[::-1])
        spoilt.append(version)
        return index

    two.far.store.add = spoil  # type: ignore[method-assign]
    batch(two, 0)
    site.update(1)
    site.scheduler.open_step(1, source)
    two.wait_until(lambda: site.there[-1].version == 1)
    batch(two, 1)
    assert spoilt == [1]
    assert any("all of version 1 is fetched" in line for line in one.said)
    assert torch.equal(FarKind.made[0].weights["w"], weights_of(1)["w"])


def test_an_engine_that_fails_costs_the_run_nothing(two: TwoSites) -> None:
    site, source = two.site, Source()
    site.update(0)
    one = two.come()
    FarKind.made[0].fails = True
    site.scheduler.open_step(0, source)
    assert len(batch(two, 0)) == 6
    one.wait()
    assert str(one.error) == "the engine here failed: it is out of memory"
    two.wait_until(lambda: len(site.there) == 1)


def test_an_engine_whose_answers_cannot_be_is_let_go_of_and_told_why(two: TwoSites) -> None:
    site, source = two.site, Source()
    site.update(0)
    one = two.come()
    two.far._engines[next(iter(two.far._engines))].state.handle._vocabulary = 1  # type: ignore[union-attr]
    site.scheduler.open_step(0, source)
    assert len(batch(two, 0)) == 6
    one.wait()
    assert isinstance(one.error, ConfigError)
    assert str(one.error).endswith("refuses: the engine of site-b failed: it answered a token id that is not below 1")


def test_an_evaluation_waits_for_the_newest_weights(two: TwoSites, monkeypatch: pytest.MonkeyPatch) -> None:
    site, source = two.site, Source()
    site.update(0)
    site.scheduler.open_step(0, source)
    two.come()
    batch(two, 0)
    release, take = threading.Event(), joining.SiteEngine._take

    async def late(self: Any, version: int, path: Path) -> None:
        while not release.is_set():
            await asyncio.sleep(0.01)
        await take(self, version, path)

    monkeypatch.setattr(joining.SiteEngine, "_take", late)
    site.update(1)
    answers = site.scheduler.ask([*source(8)], site.scheduler.generate_groups, 1)
    two.wait_until(lambda: len(site.there[-1].requests) > 0)
    time.sleep(0.3)
    release.set()
    assert site.scheduler.wait(WAIT_S, answers)
    versions = {
        version for answer in answers for [group] in [answer.result()] for one in group for version in one.weight_versions
    }
    assert versions == {1}
    assert FarKind.made[0].inner.answered, "it answered some"


def test_a_site_that_was_cut_off_joins_again(two: TwoSites, monkeypatch: pytest.MonkeyPatch) -> None:
    site, source = two.site, Source()
    site.update(0)
    site.scheduler.open_step(0, source)
    one = two.come(patience_s=30.0)
    is_cut, talk = threading.Event(), joining.RunAnswers._talk

    async def cut(self: Any, *arguments: Any) -> Any:
        if is_cut.is_set():
            raise ConnectionError("the network is gone")
        return await talk(self, *arguments)

    monkeypatch.setattr(joining.RunAnswers, "_talk", cut)
    is_cut.set()
    two.wait_until(lambda: len(site.there) == 1)
    seen = batch(two, 0)
    is_cut.clear()
    two.wait_until(lambda: len(site.there) == 2)
    site.update(1)
    site.scheduler.open_step(1, source)
    seen += batch(two, 1)
    check_prompts(site.scheduler, source, seen, len(seen))
    assert "the run has given it up, as it was not heard of; it joins again" in one.said
    assert [line for line in one.said if line.startswith("joined")] == ["joined as engine 1"] * 2
    assert len([line for line in one.said if "whole" in line]) == 1, "it kept its weights"


def test_there_are_no_more_engines_than_there_may_be(two: TwoSites) -> None:
    two.site.update(0)
    two.come()
    third = FarSite(two.url, two.model)
    third.wait()
    assert str(third.error) == "the run has as many engines as rollout.max_engines allows"


def test_the_run_tells_sites_that_it_ends(two: TwoSites) -> None:
    two.site.update(0)
    one = two.come()
    two.site.running._closing.set()
    two.site.running._thread.join()
    two.far.close()
    one.wait()
    assert one.error is None
    assert one.said[-1].startswith("left: the run has ended")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "another-token-than-its"}, "refuses: the token is missing or wrong"),
        ({"url": "ftp://127.0.0.1:1"}, "URL is 'ftp://127.0.0.1:1'; it must be http://HOST:PORT or https://HOST:PORT"),
        ({"url": "http://127.0.0.1:9"}, "no run answers at http://127.0.0.1:9"),
        ({"model": 2.0}, "weights of the model here are not the run's: name a copy of the run's model by --model"),
        ({"megarl": "0.0.1"}, f"megarl here is 0.0.1, the run's is {__version__}"),
    ],
)
def test_who_cannot_join_is_told_in_a_sentence_before_anything_is_loaded(
    two: TwoSites, tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_in(tmp_path / "other", changes["model"]) if "model" in changes else two.model
    if "megarl" in changes:
        monkeypatch.setattr("megarl.options.elastic_engines.sites.model_facts.__version__", changes["megarl"])
    stranger = FarSite(changes.get("url", two.url), model, changes.get("token", TOKEN), patience_s=0.1)
    stranger.wait()
    assert isinstance(stranger.error, ConfigError)
    assert message in str(stranger.error)
    assert "\n" not in str(stranger.error)
    assert FarKind.made == []


def test_the_run_refuses_too_who_did_not_ask_before(two: TwoSites) -> None:
    """A client of another version that would join without asking."""

    async def ask(version: str, model: ModelFacts) -> None:
        run = joining.RunAnswers(two.url, TOKEN, 1.0)
        try:
            await run.ask("/join", dict[str, Any], Joining(version, model, "site-b"))
        finally:
            await run.close()

    facts = two.far.facts()
    with pytest.raises(ConfigError, match="megarl here is 9"):
        asyncio.run(ask("9", facts.model))
    with pytest.raises(ConfigError, match="weights of the model here are not the run's"):
        asyncio.run(ask(__version__, ModelFacts(facts.model.config, facts.model.tokenizer, "0")))


# the command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/none"], "RUN is 'runs/none', which has no sites/address.json that can be read"),
        (["http://a:1"], "the run's token is missing: set --token-file or MEGARL_SITES_TOKEN"),
        (["http://a:1", "--token", "short"], "the token must be at least 16 printable ASCII characters"),
        (["http://a:1", "--token", "x" * 16, "--token-file", "f"], "--token-file is given beside --token; leave one out"),
        (["http://a:1", "--token-file", "no-such-file"], "--token-file no-such-file cannot be read"),
        (["http://a:1", "--token", "x" * 16, "--name", "a b"], "--name is 'a b'; it must be at most 64 letters"),
        (["http://a:1", "--token", "x" * 16, "--patience", "-1"], "--patience is -1.0; it must be a number of seconds above 0"),
        (["a:1", "--token", "x" * 16], "RUN is 'a:1', which has no sites/address.json"),
        (["http://a:1/x", "--token", "x" * 16], "URL is 'http://a:1/x'; it must be http://HOST:PORT"),
    ],
)
def test_bad_words_are_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gate.TOKEN_VARIABLE, raising=False)
    assert main(["node", "join", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("megarl: ")
    assert message in said
    assert said.count("\n") == 1


def test_a_run_makes_a_token_that_its_owner_alone_can_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gate.TOKEN_VARIABLE, raising=False)
    token = gate.token_of(site.config, SitesConfig())
    path = Path(site.config.run_folder) / "sites" / "token"
    assert len(token) >= 2 * bearer_tokens.SHORTEST_TOKEN
    assert path.stat().st_mode & 0o077 == 0
    assert gate.token_of(site.config, SitesConfig()) == token, "a run that goes on keeps it"
    gate.write_address(site.config, SitesConfig(host="::1"), 81, token)
    address = path.with_name("address.json")
    assert address.stat().st_mode & 0o077 == 0
    assert json.loads(address.read_text())["url"] == "http://[::1]:81"


def test_orders_that_a_site_may_not_have_are_told_again_and_each_is_dropped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FarEngine(Joining(__version__, ModelFacts("", "", ""), "site-b"))
    engine.give("cut", words=["a"])
    number, answer = engine.ask(EngineRequest([[1]], SamplingParams(4)))
    poll = Poll(engine.key, 1, 0, None, None, 0, 0)
    assert [order.what for order in engine.hear(poll)] == ["cut", "generate"]
    assert [order.what for order in engine.hear(poll)] == ["cut", "generate"]
    assert engine.hear(joining.msgspec.structs.replace(poll, seen=1)) == [Order(2, "generate", sent_request_of(engine))]
    engine.drop(number)
    assert not engine.has_orders, "it was not fetched: nothing is to be stopped"
    number, answer = engine.ask(EngineRequest([[1]], SamplingParams(4)))
    engine.hear(joining.msgspec.structs.replace(poll, seen=number))
    engine.drop(number)
    assert [(order.what, order.stop) for order in engine._orders] == [("stop", number)]
    _, answer = engine.ask(EngineRequest([[1]], SamplingParams(4)))
    engine.lose("it is gone")
    with pytest.raises(WorkerError, match="it is gone"):
        answer.result(0)
    with pytest.raises(WorkerError, match="it is gone"):
        engine.ask(EngineRequest([[1]], SamplingParams(4)))


def sent_request_of(engine: FarEngine) -> Any:
    return engine._orders[-1].request


def test_engines_of_other_sites_are_told_in_engines_json(two: TwoSites) -> None:
    two.site.update(0)
    two.come()
    told: dict[str, Any] = {}

    def is_told() -> bool:
        told.update(json.loads((Path(two.site.config.run_folder) / requests.ENGINES).read_text()))
        return any(one["node"] == "site-b" and one["stage"] == "there" for one in told["engines"])

    two.wait_until(is_told)
    assert told["nodes"]["site site-b"] == "site-b"
    assert told_and_kept(two.site.scheduler) == set()
