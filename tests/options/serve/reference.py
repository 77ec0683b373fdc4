"""A trainer and a sampler by transformers and PEFT in float32, in one process: what the server's own must compute."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.options.serve.values import (
    AdamParams,
    AdapterChoice,
    Answer,
    Datum,
    Loss,
    Passed,
    RequestError,
    Sampled,
    SampleRequest,
)

VOCABULARY = 64
END = 2
ATTENTION, MLP, UNEMBED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"), ("lm_head",)


def base_model() -> LlamaForCausalLM:
    """A tiny Llama with random weights, always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15)
    return model


def with_adapters(base: LlamaForCausalLM, choice: AdapterChoice) -> PeftModel:
    """The base with adapters of PEFT, A drawn by the seed and B zero, scaled by 32 / rank."""
    targets = ATTENTION * choice.train_attn + MLP * choice.train_mlp + UNEMBED * choice.train_unembed
    torch.manual_seed(choice.seed)
    config = LoraConfig(r=choice.rank, lora_alpha=32, target_modules=list(targets), lora_dropout=0.0)
    return get_peft_model(copy.deepcopy(base), config).eval()


@dataclass
class _Trained:
    module: Any
    choice: AdapterChoice | None
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    step: int = 0

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}


class ReferenceTrainer:
    """`Trainer` of `values.py`."""

    def __init__(self) -> None:
        self.base = base_model()
        self.models: dict[str, _Trained] = {}
        self.calls: list[tuple[Any, ...]] = []
        """What was computed, in order."""
        self.gate = threading.Event()
        """Passes wait for it."""
        self.gate.set()

    def create(self, model: str, choice: AdapterChoice | None) -> None:
        module = copy.deepcopy(self.base) if choice is None else with_adapters(self.base, choice)
        self.models[model] = _Trained(module, choice)
        self.calls.append(("create", model))

    def drop(self, model: str) -> None:
        del self.models[model]
        self.calls.append(("drop", model))

    def run_pass(self, model: str, data: Sequence[Datum], loss: Loss, *, backward: bool) -> Passed:
        assert self.gate.wait(60)
        for number, datum in enumerate(data):
            _check(number, datum, loss)
        module, outputs, total = self.models[model].module, [], torch.zeros(())
        for datum in data:
            with torch.set_grad_enabled(backward):
                logits = module(input_ids=torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
                targets = torch.from_numpy(np.array(datum.inputs["target_tokens"]))
                every = logits.float().log_softmax(-1)
                columns = targets if targets.ndim == 2 else targets[:, None]
                log_probs = every.gather(1, columns)
                log_probs = log_probs if targets.ndim == 2 else log_probs[:, 0]
                value = loss_of(loss, log_probs, {name: torch.from_numpy(np.array(x)) for name, x in datum.inputs.items()})
                if backward:
                    value.backward()
            total = total + value.detach()
            outputs.append({"logprobs": log_probs.detach().numpy()})
        self.calls.append(("backward" if backward else "forward", model, len(data)))
        return Passed(outputs, {"loss:sum": float(total)})

    def optimizer_step(self, model: str, adam: AdamParams) -> dict[str, float]:
        trained = self.models[model]
        trained.step += 1
        with torch.no_grad():
            found = trained.parameters()
            gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in found.items()}
            norm = float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())
            scale = min(1.0, adam.grad_clip_norm / norm) if adam.grad_clip_norm and norm else 1.0
            for name, parameter in found.items():
                gradient = gradients[name] * scale
                m, v = trained.moments.get(name, (torch.zeros_like(parameter), torch.zeros_like(parameter)))
                m = adam.beta1 * m + (1 - adam.beta1) * gradient
                v = adam.beta2 * v + (1 - adam.beta2) * gradient**2
                trained.moments[name] = m, v
                m_hat, v_hat = m / (1 - adam.beta1**trained.step), v / (1 - adam.beta2**trained.step)
                parameter.mul_(1 - adam.learning_rate * adam.weight_decay)
                parameter.sub_(adam.learning_rate * m_hat / (v_hat.sqrt() + adam.eps))
                parameter.grad = None
        self.calls.append(("step", model))
        return {"grad_norm": norm}

    def forget_gradients(self, model: str) -> None:
        for parameter in self.models[model].parameters().values():
            parameter.grad = None
        self.calls.append(("forget", model))

    def save(self, model: str, folder: Path) -> None:
        trained = self.models[model]
        folder.mkdir()
        save_file(
            {name: parameter.detach().clone() for name, parameter in trained.parameters().items()},
            folder / "weights.safetensors",
        )
        moments = {f"{name}/{i}": moment for name, pair in trained.moments.items() for i, moment in enumerate(pair)}
        save_file(moments, folder / "moments.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": trained.step}))
        self.calls.append(("save", model))

    def load(self, model: str, folder: Path, *, with_optimizer: bool) -> None:
        trained, found = self.models[model], load_file(folder / "weights.safetensors")
        with torch.no_grad():
            for name, parameter in trained.parameters().items():
                parameter.copy_(found[name])
                parameter.grad = None
        trained.moments, trained.step = {}, 0
        if with_optimizer:
            moments = load_file(folder / "moments.safetensors")
            names = {name.rpartition("/")[0] for name in moments}
            trained.moments = {name: (moments[f"{name}/0"], moments[f"{name}/1"]) for name in names}
            trained.step = json.loads((folder / "state.json").read_text())["step"]
        self.calls.append(("load", model))

    def export(self, model: str, folder: Path) -> None:
        trained = self.models[model]
        trained.module.save_pretrained(folder)
        if trained.choice is not None:
            (folder / "choice.json").write_text(json.dumps(asdict(trained.choice)))
        self.calls.append(("export", model))


def _check(number: int, datum: Datum, loss: Loss) -> None:
    if loss.name not in LOSSES:
        raise RequestError(f"loss_fn is '{loss.name}'; it must be one of {', '.join(LOSSES)}")
    for name, values in datum.inputs.items():
        if len(values) != len(datum.tokens):
            raise RequestError(f"datum {number} has {name} {[*values.shape]} for {len(datum.tokens)} tokens")
        if not np.isfinite(values).all():
            raise RequestError(f"datum {number} has {name} that are not finite")


def loss_of(loss: Loss, log_probs: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """A loss of one datum by its documented formula, a sum over tokens."""
    return LOSSES[loss.name](log_probs, given, loss.parameters)


def _clipped(ratio: Tensor, given: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Tensor:
    low = given.get("clip_low_threshold", torch.tensor(float(parameters.get("clip_low_threshold", 0.8))))
    high = given.get("clip_high_threshold", torch.tensor(float(parameters.get("clip_high_threshold", 1.2))))
    return torch.minimum(torch.maximum(ratio, low), high)


def _cross_entropy(p: Tensor, given: Mapping[str, Tensor], _: Mapping[str, Any]) -> Tensor:
    return -(p * given.get("weights", torch.ones(()))).sum()


def _importance_sampling(p: Tensor, given: Mapping[str, Tensor], _: Mapping[str, Any]) -> Tensor:
    return -((p - given["logprobs"]).exp() * given["advantages"]).sum()


def _ppo(p: Tensor, given: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Tensor:
    ratio, advantages = (p - given["logprobs"]).exp(), given["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, given, parameters) * advantages).sum()


def _cispo(p: Tensor, given: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Tensor:
    ratio = (p - given["logprobs"]).exp()
    return -(_clipped(ratio, given, parameters).detach() * p * given["advantages"]).sum()


def _dro(p: Tensor, given: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Tensor:
    beta = float(parameters.get("beta", 0.05))
    return -(p * given["advantages"] - 0.5 * beta * (p - given["logprobs"]).square()).sum()


def _gspo(p: Tensor, given: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Tensor:
    mask = given["sequence_ratio_mask"]
    mean = ((p - given["logprobs"]) * mask).sum() / mask.sum()
    ratio, advantages = mean.detach().exp() * (p - p.detach()).exp(), given["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, given, parameters) * advantages).sum()


LOSSES = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


class ReferenceSampler:
    """`Sampler` of `values.py`."""

    def __init__(self) -> None:
        self.base = base_model()
        self.adapters: dict[str, Any] = {}
        self.asked: list[SampleRequest] = []
        self.gate = asyncio.Event()
        """Samples wait for it; made in any loop."""
        self.gate.set()
        self.cancelled = 0

    async def add(self, adapter: str, folder: Path) -> None:
        config = folder / "adapter_config.json"
        if not config.is_file():
            raise RequestError(f"{folder.name} has no adapters")
        self.adapters[adapter] = PeftModel.from_pretrained(copy.deepcopy(self.base), str(folder)).eval()

    async def drop(self, adapter: str) -> None:
        self.adapters.pop(adapter, None)

    async def sample(self, request: SampleRequest) -> Sampled:
        self.asked.append(request)
        try:
            await self.gate.wait()
            return await asyncio.to_thread(self._sample, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _sample(self, request: SampleRequest) -> Sampled:
        if not len(request.tokens):
            raise RequestError("prompt has no tokens")
        module = self.adapters[request.adapter] if request.adapter is not None else self.base
        seed = request.seed if request.seed is not None else len(self.asked)
        answers = [self._answer(module, request, seed * 1000 + number) for number in range(request.num_samples)]
        prompt = _log_probs(module, request.tokens)
        own = prompt[np.arange(len(request.tokens) - 1), request.tokens[1:]]
        scored = np.append(np.float32("nan"), own) if request.prompt_logprobs else None
        if scored is not None and request.prompt_logprobs_last_n is not None:
            scored[: -request.prompt_logprobs_last_n] = np.nan
        topk = None
        if request.topk_prompt_logprobs:
            ids, values = _topk(prompt[:-1], request.topk_prompt_logprobs)
            topk = np.pad(ids, ((1, 0), (0, 0))), np.pad(values, ((1, 0), (0, 0)), constant_values=-99999.0)
        wanted = request.target_prompt_logprobs
        target = None
        if wanted is not None:
            rows = np.take_along_axis(prompt[:-1], np.maximum(wanted, 0), 1)
            target = np.where(wanted >= 0, rows, 0.0).astype(np.float32)
        alternatives = None
        if k := request.prompt_alt_tokens_k:
            drawn = torch.multinomial(torch.from_numpy(prompt[:-1]).exp(), k, replacement=True).numpy()
            alternatives = drawn, np.take_along_axis(prompt[:-1], drawn, 1)
        return Sampled(answers, scored, topk, target, alternatives)

    def _answer(self, module: Any, request: SampleRequest, seed: int) -> Answer:
        tokens, found, log_probs, likeliest = request.tokens, [], [], []
        generator = torch.Generator().manual_seed(seed)
        stops = (END,) if request.stop is None else request.stop
        reason = "length"
        for _ in range(request.max_tokens or 16):
            row = torch.from_numpy(_log_probs(module, tokens, request.temperature)[-1])
            token = int(torch.multinomial(row.exp(), 1, generator=generator)) if request.temperature else int(row.argmax())
            found.append(token)
            log_probs.append(float(row[token]))
            likeliest.append(row.numpy())
            tokens = np.append(tokens, np.int32(token))
            if token in stops:
                reason = "stop"
                break
        topk = _topk(np.stack(likeliest), request.topk_sample_logprobs) if request.topk_sample_logprobs else None
        return Answer(np.array(found, np.int32), np.array(log_probs, np.float32), reason, topk)  # type: ignore[arg-type]


def _topk(rows: Any, k: int) -> tuple[Any, Any]:
    ids = np.argsort(-rows, axis=1)[:, :k]
    return ids.astype(np.int32), np.take_along_axis(rows, ids, 1)


def _log_probs(module: Any, tokens: Any, temperature: float = 1.0) -> Any:
    with torch.no_grad():
        logits = module(input_ids=torch.from_numpy(np.asarray(tokens, np.int64))[None]).logits[0].float()
    return (logits / (temperature or 1.0)).log_softmax(-1).numpy()
