"""SmolLM2-135M-Instruct, the real thing: the policy's log-probs are Hugging Face's, whole or in two pipeline stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.data.stream import Response, Unit, split_shared_prompts
from tests.world import World

MODEL = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"
CONVERSATIONS = [
    ("What is 12 + 7?", ["12 + 7 = 19", "The answer is 19."]),
    ("Name the capital of France.", ["The capital of France is Paris, on the Seine.", "Paris"]),
    ("Write a haiku about rain.", ["Soft rain on the roof,\na quiet song in the night,\nthe garden drinks deep."]),
]
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no {MODEL.name} folder; make it with: make model"),
]


def units() -> list[Unit]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    built, index = [], 0
    for question, answers in CONVERSATIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        responses = []
        for answer in answers:
            ids = torch.tensor([*tokenizer.encode(answer), tokenizer.eos_token_id])
            responses.append(Response(index, ids, torch.ones(len(ids), dtype=torch.bool)))
            index += 1
        built.append(Unit(torch.tensor(tokenizer.encode(prompt)), responses))
    return built


def policy_log_probs(rank: int, world_size: int, layout: Layout, packed: bool) -> dict[int, torch.Tensor]:
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=0)
    role = RankModel(ModelOptions(str(MODEL), layout, trainable=False))
    micro_batches = [units()] if packed else [[unit] for unit in split_shared_prompts(units())]
    return role.forward(micro_batches)


def hugging_face(dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Log-probs by transformers computing in `dtype`. The log-softmax is taken in float64: torch's float32 log_softmax over
    49,152 tokens is itself off by more than 1e-5."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the world: matrix products round differently with more
    found = {}
    for unit in units():
        for response in unit.responses:
            ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
            with torch.no_grad():
                logits = model(ids).logits[0, len(unit.prompt_ids) - 1 : -1]
            found[response.index] = logits.double().log_softmax(-1).gather(1, response.token_ids[:, None])[:, 0]
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module")
def references() -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Hugging Face's log-probs computed in float64, and in float32."""
    return hugging_face(torch.float64), hugging_face(torch.float32)


def largest(ours: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> float:
    assert ours.keys() == expected.keys()
    return max(float((ours[index].double() - expected[index]).abs().max()) for index in expected)


@pytest.mark.parametrize("packed", [False, True], ids=["one sequence at a time", "packed with shared prompts"])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=["one rank", "pp2"])
def test_log_probs_of_the_real_model_equal_hugging_face(
    world: World, references: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]], layout: Layout, packed: bool
) -> None:
    """float64 decides: this model's large activations make float32 differ by 3e-5 with the order in which a product is summed,
    which a CPU's vector width and a matrix's size choose. Ours is as close to the truth as Hugging Face in float32 is."""
    float64, float32 = references
    answers = world.call(policy_log_probs, layout, packed, size=layout.world_size, timeout_s=300)
    ours = {index: values[:, 0] for answer in answers for index, values in answer.items()}
    assert largest(ours, float64) < 1.5 * largest(float32, float64)
    assert largest(float32, float64) < 5e-5, "a reference that is off itself would let anything pass"
