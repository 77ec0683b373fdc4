"""Every public method of the package's clients, unchanged, against the app by HTTP; values are those of the reference."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from megarl.options.serve.values import AdamParams, AdapterChoice, Datum, Loss, SampleRequest
from tests.options.serve.reference import ReferenceSampler, ReferenceTrainer
from tests.options.serve.served import BASE, KEY, Served, serving

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
TOKENS = np.arange(1, 9, dtype=np.int32)
PARAMS = types.SamplingParams(max_tokens=6, seed=7)
PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "1")
        with serving(tmp_path_factory.mktemp("served")) as served:
            yield served


@pytest.fixture
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    with served.client() as client:
        yield client


def inputs(loss: str, length: int, seed: int = 0) -> dict[str, Any]:
    """Inputs of a loss for one datum."""
    random = np.random.default_rng(seed)
    given: dict[str, Any] = {"target_tokens": random.integers(3, 64, length)}
    if loss == "cross_entropy":
        given["weights"] = random.random(length).astype(np.float32)
    else:
        given["logprobs"] = -4 + 0.3 * random.standard_normal(length).astype(np.float32)
        given["advantages"] = random.standard_normal(length).astype(np.float32)
    if loss == "gspo":
        given["sequence_ratio_mask"] = np.ones(length, np.float32)
    return given


def both(loss: str, lengths: tuple[int, ...]) -> tuple[list[types.Datum], list[Datum]]:
    """The same data for the client and for the reference."""
    sent, plain = [], []
    for number, length in enumerate(lengths):
        tokens = np.random.default_rng(number).integers(3, 64, length).astype(np.int32)
        given = inputs(loss, length, number)
        sent.append(types.Datum(model_input=types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=given))
        plain.append(Datum(tokens, given))
    return sent, plain


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_losses_and_steps_by_the_api_are_those_of_the_trainer_bit_for_bit(client: tinker.ServiceClient, loss: str) -> None:
    config = {"beta": 0.1} if loss == "dro" else {"clip_low_threshold": 0.7} if loss in ("ppo", "cispo") else None
    training = client.create_lora_training_client(base_model=BASE, rank=3, seed=5, train_unembed=False).result()
    reference = ReferenceTrainer()
    reference.create("m", AdapterChoice(3, 5, train_unembed=False))
    for step in range(3):
        sent, plain = both(loss, (5, 8 + step, 3))
        passed, stepped = (
            training.forward_backward(sent, loss, config),
            training.optim_step(types.AdamParams(learning_rate=0.01)),
        )  # type: ignore[arg-type]
        expected = reference.run_pass("m", plain, Loss(loss, config or {}), backward=True)
        metrics = reference.optimizer_step("m", AdamParams(learning_rate=0.01))
        assert passed.result().metrics == pytest.approx(dict(expected.metrics), rel=1e-12)
        for answer, wanted in zip(passed.result().loss_fn_outputs, expected.outputs, strict=True):
            np.testing.assert_array_equal(answer["logprobs"].to_numpy(), wanted["logprobs"])
        assert stepped.result().metrics == pytest.approx(metrics, rel=1e-12)


def test_a_batch_is_cut_into_requests_whose_gradients_add_up(tmp_path: Path) -> None:
    with serving(tmp_path, client_flags={"fwdbwd_max_chunk_len": 4}) as served, served.client() as client:
        training = client.create_lora_training_client(base_model=BASE, rank=2, seed=1).result()
        sent, plain = both("cross_entropy", (4,) * 11)
        answer = training.forward_backward(sent, "cross_entropy").result()
        metrics = training.optim_step(types.AdamParams()).result().metrics
        assert [call[2] for call in served.trainer.calls if call[0] == "backward"] == [4, 4, 3]
    reference = ReferenceTrainer()
    reference.create("m", AdapterChoice(2, 1))
    expected = reference.run_pass("m", plain, Loss("cross_entropy"), backward=True)
    for out, wanted in zip(answer.loss_fn_outputs, expected.outputs, strict=True):
        np.testing.assert_array_equal(out["logprobs"].to_numpy(), wanted["logprobs"])
    assert answer.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    assert metrics == pytest.approx(reference.optimizer_step("m", AdamParams()), rel=1e-6)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_several_targets_per_position_come_dense_and_sparse(client: tinker.ServiceClient, *, is_sparse: bool) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=2, seed=1).result()
    targets, weights = torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, 5)
    targets[:, 0], weights[:, 0] = torch.arange(10, 18), torch.linspace(0.5, 1.5, 8)
    targets[3, 4], weights[3, 4] = 60, -2.0
    given: dict[str, Any] = {"target_tokens": targets, "weights": weights}
    if not is_sparse:
        given = {name: types.TensorData.from_numpy(value.numpy()) for name, value in given.items()}
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS.tolist()), loss_fn_inputs=given)
    assert (datum.loss_fn_inputs["weights"].sparse_crow_indices is not None) is is_sparse
    answer = training.forward_backward([datum], "cross_entropy").result()
    reference = ReferenceTrainer()
    reference.create("m", AdapterChoice(2, 1))
    plain = Datum(TOKENS, {"target_tokens": targets.numpy(), "weights": weights.numpy()})
    expected = reference.run_pass("m", [plain], Loss("cross_entropy"), backward=True)
    assert answer.loss_fn_outputs[0]["logprobs"].shape == [8, 5]
    np.testing.assert_array_equal(
        answer.loss_fn_outputs[0]["logprobs"].to_numpy().reshape(8, 5), expected.outputs[0]["logprobs"]
    )
    assert answer.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)


def test_forward_adds_no_gradient(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=2, seed=1).result()
    sent, _ = both("cross_entropy", (5,))
    training.forward(sent, "cross_entropy").result()
    assert training.optim_step(types.AdamParams()).result().metrics == {"grad_norm": 0.0}


def test_custom_losses_are_computed_by_the_client_and_their_gradients_sent(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=2, seed=1).result()
    sent, plain = both("cross_entropy", (5, 6))

    def squares(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = sum((row.square().sum() for row in logprobs), torch.zeros(()))
        return loss, {"rows:sum": float(len(logprobs))}

    answer = training.forward_backward_custom(sent, squares).result()
    metrics = training.optim_step(types.AdamParams()).result().metrics
    reference = ReferenceTrainer()
    reference.create("m", AdapterChoice(2, 1))
    forward = reference.run_pass("m", plain, Loss("cross_entropy"), backward=False)
    weighted = [
        Datum(datum.tokens, {**datum.inputs, "weights": -2 * out["logprobs"]})
        for datum, out in zip(plain, forward.outputs, strict=True)
    ]
    reference.run_pass("m", weighted, Loss("cross_entropy"), backward=True)
    assert answer.metrics["rows:sum"] == 2
    assert metrics == pytest.approx(reference.optimizer_step("m", AdamParams()), rel=1e-6)


def test_training_goes_on_from_saved_weights_with_the_optimizer_and_without(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=4, seed=2, train_mlp=False).result()
    sent, _ = both("cross_entropy", (6, 4))

    def step(of: tinker.TrainingClient) -> tuple[Any, Any]:
        passed, stepped = of.forward_backward(sent, "cross_entropy"), of.optim_step(types.AdamParams(learning_rate=0.01))
        return passed.result().metrics, stepped.result().metrics

    step(training)
    saved = training.save_state("first", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
    assert saved == f"tinker://{training.model_id}/weights/first"
    second, third = step(training), step(training)
    whole = client.create_training_client_from_state_with_optimizer(saved).result()
    assert (step(whole), step(whole)) == (second, third)
    weights = client.create_training_client_from_state(saved, user_metadata={"x": "y"}).result()
    first_step, second_step = step(weights), step(weights)
    assert first_step == second
    assert second_step != third
    assert weights.get_info().lora_rank == 4
    training.load_state_with_optimizer(saved).result()
    assert (step(training), step(training)) == (second, third)
    training.load_state(saved).result()
    assert (step(training), step(training)) == (first_step, second_step)
    training.save_state("first", overwrite=True).result()
    rest = tinker.RestClient(base_url=client.holder._base_url, api_key=KEY)
    info = rest.get_weights_info_by_tinker_path(saved).result()
    assert (info.base_model, info.lora_rank, info.train_mlp, info.train_attn) == (BASE, 4, False, True)


def test_samples_are_those_of_the_weights_that_were_saved(served: Served, client: tinker.ServiceClient, tmp_path: Path) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    sent, _ = both("cross_entropy", (6, 4))

    def trained() -> tinker.SamplingClient:
        training.forward_backward(sent, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
        return training.save_weights_and_get_sampling_client().result()

    def direct(folder: Path) -> list[float]:
        sampler = ReferenceSampler()
        asyncio.run(sampler.add("x", folder))
        request = SampleRequest(TOKENS, "x", max_tokens=1, prompt_logprobs=True)
        sampled = asyncio.run(sampler.sample(request))
        assert sampled.prompt_logprobs is not None
        return [float(value) for value in sampled.prompt_logprobs[1:]]

    prompt = types.ModelInput.from_ints(TOKENS.tolist())
    first = trained()
    served.trainer.export(training.model_id, tmp_path / "first")
    named = training.save_weights_for_sampler("named").result().path
    second = trained()
    served.trainer.export(training.model_id, tmp_path / "second")
    base = client.create_sampling_client(base_model=BASE).result()
    by_name = client.create_sampling_client(model_path=named).result()
    of_state = client.create_sampling_client(model_path=training.save_state("state").result().path).result()
    found = {
        name: of.compute_logprobs(prompt).result()[1:]
        for name, of in {"1": first, "2": second, "n": by_name, "s": of_state}.items()
    }
    assert found["1"] == found["n"] == direct(tmp_path / "first")
    assert found["2"] == found["s"] == direct(tmp_path / "second")
    assert found["1"] != found["2"] != base.compute_logprobs(prompt).result()[1:]
    assert by_name.get_base_model() == BASE == first.get_base_model()


def test_everything_that_a_sample_can_be_asked_for_comes_back(client: tinker.ServiceClient) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    tokens = TOKENS.tolist()
    targets = torch.full((7, 2), -1, dtype=torch.int64)
    targets[2, 1], targets[6, 0] = 11, 12
    for target in (types.TensorData.from_torch(targets), types.TensorData.from_torch_sparse(targets, pad_value=-1)):
        answer = sampling.sample(
            types.ModelInput.from_ints(tokens),
            3,
            types.SamplingParams(max_tokens=5, seed=1, stop=[9], temperature=0.8),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=4,
            topk_sample_logprobs=2,
            target_prompt_logprobs=target,
            prompt_alt_tokens_k=3,
            prompt_logprobs_last_n=6,
        ).result()
        sampler = ReferenceSampler()
        wanted = SampleRequest(
            TOKENS,
            num_samples=3,
            max_tokens=5,
            temperature=0.8,
            seed=1,
            stop=(9,),
            prompt_logprobs=True,
            prompt_logprobs_last_n=6,
            topk_prompt_logprobs=4,
            topk_sample_logprobs=2,
            target_prompt_logprobs=targets.numpy(),
        )
        expected = asyncio.run(sampler.sample(wanted))
        assert expected.prompt_logprobs is not None
        assert expected.topk_prompt is not None
        assert expected.target_prompt_logprobs is not None
        for sequence, plain in zip(answer.sequences, expected.sequences, strict=True):
            assert plain.topk is not None
            assert sequence.tokens == plain.tokens.tolist()
            assert sequence.stop_reason == plain.stop_reason
            np.testing.assert_array_equal(np.float32(sequence.logprobs), plain.logprobs)
            np.testing.assert_array_equal(sequence.topk_logprobs_np.logprobs, plain.topk[1])
            np.testing.assert_array_equal(sequence.topk_logprobs_np.token_ids, plain.topk[0])
        assert len({sequence.sequence_id for sequence in answer.sequences}) == 3
        np.testing.assert_array_equal(answer.prompt_logprobs_np, expected.prompt_logprobs)
        assert answer.prompt_logprobs[:2] == [None, None]
        np.testing.assert_array_equal(answer.topk_prompt_logprobs_np.logprobs, expected.topk_prompt[1])
        assert answer.target_prompt_logprobs.sparse_crow_indices == target.sparse_crow_indices
        np.testing.assert_array_equal(answer.target_prompt_logprobs.to_numpy(), expected.target_prompt_logprobs)
        assert answer.prompt_alt_tokens.tokens.shape == [7, 3] == answer.prompt_alt_tokens.logprobs.shape


def test_inflight_samplers_use_the_newest_weights_and_snapshots_keep_theirs(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    sent, _ = both("cross_entropy", (6, 4))

    def trained(kind: Any) -> tinker.SamplingClient:
        training.forward_backward(sent, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.05))
        return training.save_weights_and_get_sampling_client(kind=kind).result()

    first, snapshot = trained("inflight"), trained("snapshot")
    before = [of.compute_logprobs(PROMPT).result() for of in (first, snapshot)]
    second = trained("inflight")
    after = [of.compute_logprobs(PROMPT).result() for of in (first, snapshot, second)]
    assert before[0] != before[1] == after[1]
    assert after[0] == after[2] != before[0]


def test_samplers_are_passed_to_other_processes_and_joined(served: Served, client: tinker.ServiceClient) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    handle = sampling.get_sampler_handle()
    clones = [tinker.SamplingClient.from_sampler_handle(handle, api_key=KEY), pickle.loads(pickle.dumps(sampling))]
    answers = [of.sample(PROMPT, 1, PARAMS).result().sequences[0] for of in (sampling, *clones)]
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    ids = [answer.sequence_id for answer in answers]
    assert [int(identity.split(":")[3]) // 1_000_000_000 for identity in ids] == [0, 1, 2]


def test_one_poll_waits_for_a_whole_sampling_session(tmp_path: Path) -> None:
    with serving(tmp_path, client_flags={"sample_use_retrieve_futures": True}) as served, served.client() as client:
        sampling = client.create_sampling_client(base_model=BASE).result()
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(20)]
        assert len({tuple(future.result().sequences[0].tokens) for future in futures}) == 1
        refused = sampling.sample(types.ModelInput.from_ints([]), 1, PARAMS)
        with pytest.raises(tinker.RequestFailedError, match="no tokens"):
            refused.result()


def test_weights_are_copied_and_exported(served: Served, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_PROJECT_ID", "archive")
    training = client.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    saved = training.save_state("s").result().path
    sampler = training.save_weights_for_sampler("p").result().path
    exported = training.save_weights_external("e").result().path
    assert exported == f"tinker://{training.model_id}/external_weights/e"
    copied = client.copy_weights(saved).result()
    assert copied != saved
    assert copied.endswith("/weights/s")
    assert client.create_training_client_from_state(copied).result().get_info().lora_rank == 4
    copied_sampler = client.copy_weights(sampler, ttl_seconds=7200).result()
    assert client.create_sampling_client(model_path=copied_sampler).result().sample(PROMPT, 1, PARAMS).result().sequences
    rest = client.create_rest_client()
    files = served.service.store.files(_place(exported))
    assert "adapter_model.safetensors" in files
    runs = rest.list_training_runs().result().training_runs
    assert training.model_id in [run.training_run_id for run in runs]
    assert (
        rest.get_sampler(client.create_sampling_client(model_path=sampler).result()._sampling_session_id).result().model_path
        == sampler
    )


def _place(path: str) -> Any:
    from megarl.options.serve.places import CheckpointPath

    return CheckpointPath.parse(path)


def test_methods_that_are_going_out_of_use_and_small_ones_work(
    client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: name)
    sent, _ = both("cross_entropy", (4,))

    def loss(data: Any, logprobs: Any) -> Any:
        return logprobs[0].sum(), {}

    async def work() -> None:
        assert (await client.get_server_capabilities_async()).supported_models[0].model_name == BASE
        training = await client.create_lora_training_client_async(base_model=BASE, rank=2)
        await (await training.forward_async(sent, "cross_entropy"))
        await (await training.forward_backward_async(sent, "cross_entropy"))
        await (await training.forward_backward_custom_async(sent, loss))
        await (await training.optim_step_async(types.AdamParams()))
        saved = (await (await training.save_state_async("a"))).path
        await (await training.load_state_async(saved))
        await (await training.load_state_with_optimizer_async(saved))
        named = (await (await training.save_weights_for_sampler_async("b"))).path
        await (await training.save_weights_external_async("c"))
        assert (await training.get_info_async()).model_id == training.model_id
        assert training.get_tokenizer() is not None
        sampling = await training.create_sampling_client_async(named)
        assert await sampling.get_base_model_async() == BASE
        assert (await sampling.sample_async(PROMPT, 1, PARAMS)).sequences
        assert (await sampling.compute_logprobs_async(PROMPT))[0] is None
        assert sampling.get_tokenizer() is not None
        assert sampling.get_telemetry() is client.get_telemetry() is training.get_telemetry()
        passed = await training.save_weights_and_get_sampling_client_async()
        assert (await passed.sample(PROMPT, 1, PARAMS)).sequences
        await client.create_training_client_from_state_async(saved)
        await client.create_training_client_from_state_with_optimizer_async(saved)
        assert (await client.create_sampling_client_async(base_model=BASE)).get_base_model() == BASE

    asyncio.run(work())
    training = client.create_lora_training_client(base_model=BASE, rank=2).result()
    named = training.save_weights_for_sampler("d").result().path
    assert training.create_sampling_client(named).result().get_base_model() == BASE
    created = tinker.SamplingClient.create(client.holder, base_model=BASE).result()
    assert created.get_base_model() == BASE
    assert client.get_console_url()
    assert training.get_console_url()

    def traced(logprobs: Any, weights: Any) -> Any:
        total = -(logprobs * weights).sum()
        return total, {"custom/x:sum": total}

    handle = client.create_custom_loss(traced, input_ranks={"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is None
    assert training.forward_backward_custom(sent, handle).result().metrics["custom/x:sum"]


def test_a_loss_that_a_client_defines_is_read_by_the_server_where_it_can(tmp_path: Path) -> None:
    read: list[Any] = []

    def read_graph(name: str, inputs: Any, graph: Any) -> str:
        read.append((name, inputs, graph["format"]))
        return "graph"

    with serving(tmp_path, read_graph=read_graph) as served, served.client() as client:
        seen: list[Loss] = []
        run_pass = served.trainer.run_pass

        def run(model: str, data: Any, loss: Loss, *, backward: bool) -> Any:
            seen.append(loss)
            return run_pass(model, data, Loss("cross_entropy"), backward=backward)

        served.trainer.run_pass = run  # type: ignore[method-assign]
        training = client.create_lora_training_client(base_model=BASE, rank=2).result()

        def traced(logprobs: Any, weights: Any) -> Any:
            return -(logprobs * weights).sum(), {}

        handle = client.create_custom_loss(traced, input_ranks={"logprobs": 1, "weights": 1}).result()
        sent, _ = both("cross_entropy", (4,))
        training.forward_backward_custom(sent, handle).result()
        assert read == [("traced", [("logprobs", 1), ("weights", 1)], 1)]
        assert seen == [Loss("custom", {}, "graph")]
        with pytest.raises(tinker.RequestFailedError, match="does not exist"):
            training.forward_backward(sent, "custom", {"loss_id": "loss-of-nobody"}).result()


EXERCISED_BY_OTHERS = {"on_queue_state_change": "the client calls it itself"}


def test_no_public_method_is_left_out() -> None:
    source = Path(__file__).read_text()
    missing = []
    for kind in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient):
        for name, _ in inspect.getmembers(kind, lambda member: inspect.isfunction(member) or isinstance(member, property)):
            is_public = not name.startswith("_") and name not in EXERCISED_BY_OTHERS
            if is_public and f".{name}" not in source and not (name == "close" and "with served.client()" in source):
                missing.append(f"{kind.__name__}.{name}")
    assert missing == []


def test_a_finished_session_beats_no_more_and_its_models_are_gone(served: Served) -> None:
    client = served.client()
    training = client.create_lora_training_client(base_model=BASE, rank=2).result()
    session = client.holder.get_session_id()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client.close("success", detail="done").result()
    record = served.service.store.registry.sessions.get("local", session)
    assert record.status is not None
    assert record.status["detail"] == "done"
    with served.client() as other:
        with pytest.raises(tinker.APIStatusError) as refused:
            other.holder.run_coroutine_threadsafe(_beat(other, session)).result()
        assert refused.value.status_code == 410
    assert ("drop", training.model_id) in served.trainer.calls


async def _beat(client: tinker.ServiceClient, session: str) -> None:
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    with client.holder.aclient(ClientConnectionPoolType.SESSION) as connection:
        await connection.service.session_heartbeat(session_id=session, max_retries=0)
