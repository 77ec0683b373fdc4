"""A tiny Llama for benchmarks/served_curves.py that adds in the words of the cookbook's arithmetic recipe, and errs on purpose.

    python benchmarks/served_curves_model.py OUT_FOLDER

Its weights are written down, not trained. Every number is a token, with cosine and sine of its multiples of some angles. Of the
token `assistant`, two heads fetch those of the two numbers by their distance, the MLP multiplies them to those of the sum
(cos(a + b) = cos a cos b - sin a sin b), and the output layer compares these with every number's. Two values of that layer are
set so that `RIGHT` of the answers begin with the sum, the others with `WRONG`, and about `ENDED` of them
end behind that number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from megarl.system.atomic_files import whole_folder
from megarl.system.hidden_bars import hide_bars

START, END, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>"
LARGEST = 100
NUMBERS = range(2 * LARGEST + 2)
TOKENS = [PAD, UNKNOWN, START, END, "user", "assistant", "What", "is", "+", "?", *map(str, NUMBERS)]
FIRST = TOKENS.index("0")
RIGHT, WRONG, ENDED = 0.3, "201", 0.85
HIDDEN, HEADS, HEAD, MLP = 128, 4, 32, 128
ANGLES = [0.97 * math.pi / 1.7**number for number in range(10)]
MARGIN = 7.0
"""By how much the right number's logit is above that of every other, in nats."""
PAIRS = len(ANGLES)
OF_TOKEN, OF_RIGHT, OF_LEFT, OF_SUM = (slice(2 * PAIRS * part, 2 * PAIRS * (part + 1)) for part in range(4))
"""Where in the hidden state the cosines and sines are: of the token itself, of the two numbers, of their sum."""
IS_NUMBER, IS_ASSISTANT, WORDS = 100, 101, 104


def prompt(left: int, right: int) -> str:
    """The recipe's prompt of a sum in Qwen's chat form: an example comes first."""
    return f"{_asked(4, 5)}9{END}\n{_asked(left, right)}"


def _asked(left: int, right: int) -> str:
    return f"{START}user\nWhat is {left} + {right}?{END}\n{START}assistant\n"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words and whole numbers of the recipe; spaces and ends of lines are dropped."""
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=END, pad_token=PAD, model_max_length=256,
        additional_special_tokens=[START],
    )  # fmt: skip


def features() -> Tensor:
    """Cosines and then sines of every number's multiples of the angles, float32 `[NUMBERS, 2 * PAIRS]`."""
    turns = torch.arange(len(NUMBERS)).double()[:, None] * torch.tensor(ANGLES).double()
    return torch.cat([turns.cos(), turns.sin()], 1).float()


@torch.no_grad()
def make_model() -> Any:
    """The Llama; its second layer adds nothing yet."""
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=TOKENS.index(END), pad_token_id=TOKENS.index(PAD), rms_norm_eps=1e-6,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    first, second = model.model.layers
    for weight in (*first.self_attn.parameters(), *first.mlp.parameters(), model.lm_head.weight):
        weight.zero_()
    second.self_attn.o_proj.weight.zero_()
    second.mlp.down_proj.weight.zero_()
    _write_embedding(model.model.embed_tokens.weight)
    _write_attention(first.self_attn)
    _write_mlp(first.mlp)
    _write_output(model.lm_head.weight)
    _set(model, WRONG, IS_ASSISTANT, prompt(44, 47), 1 - RIGHT)
    _set(model, END, IS_NUMBER, prompt(44, 47) + "91", ENDED)
    return model


SIZE = (2 * PAIRS) ** 0.5
"""Length of every token's vector: lengths do not hang on the numbers, and so what norms divide by does not."""


def _write_embedding(weight: Tensor) -> None:
    weight.zero_()
    weight[:FIRST, WORDS : WORDS + FIRST] = torch.eye(FIRST) * SIZE
    weight[TOKENS.index("assistant"), WORDS + TOKENS.index("assistant")] = 0
    weight[TOKENS.index("assistant"), IS_ASSISTANT] = SIZE
    weight[FIRST:, OF_TOKEN] = features()
    weight[FIRST:, IS_NUMBER] = PAIRS**0.5


def _write_attention(attention: Any) -> None:
    """Two heads, which fetch the numbers 4 and 6 tokens before."""
    root = HIDDEN**0.5
    turns = torch.tensor([10_000 ** (-2 * number / HEAD) for number in range(4)])
    sharpness = 8.0 * HEAD**0.5
    half = HEAD // 2
    for group, (distance, place) in enumerate(((4, OF_RIGHT), (6, OF_LEFT))):
        keys, queries = group * HEAD, group * HEAD * HEADS // 2
        attention.k_proj.weight[keys : keys + 4, IS_NUMBER] = 2**0.5 / root
        attention.q_proj.weight[queries : queries + 4, IS_ASSISTANT] = sharpness * (distance * turns).cos() / root
        attention.q_proj.weight[queries + half : queries + half + 4, IS_ASSISTANT] = (
            -sharpness * (distance * turns).sin() / root
        )
        attention.v_proj.weight[keys : keys + 2 * PAIRS, OF_TOKEN] = torch.eye(2 * PAIRS) * SIZE / root
        attention.o_proj.weight[place, queries : queries + 2 * PAIRS] = torch.eye(2 * PAIRS)


def _write_mlp(mlp: Any) -> None:
    """Products, each of two units: z u = silu(z) u - silu(-z) u."""
    scale = HIDDEN / (4 * PAIRS)  # what the norm multiplied into a product
    unit = 0
    for pair in range(PAIRS):
        cos, sin = pair, pair + PAIRS
        for left, right, result, sign in ((cos, cos, cos, 1), (sin, sin, cos, -1), (sin, cos, sin, 1), (cos, sin, sin, 1)):
            for side in (1, -1):
                mlp.gate_proj.weight[unit, OF_LEFT.start + left] = side
                mlp.up_proj.weight[unit, OF_RIGHT.start + right] = 1
                mlp.down_proj.weight[OF_SUM.start + result, unit] = sign * side / scale
                unit += 1


def _write_output(weight: Tensor) -> None:
    """Rows of numbers: those of their cosines and sines, so that the right one is `MARGIN` above all others."""
    known = features()
    alike = (known @ known.T - torch.eye(len(NUMBERS)) * PAIRS).max()
    grown = HIDDEN**0.5 / (5 * PAIRS) ** 0.5  # by the last norm
    weight[FIRST:, OF_SUM] = known * (MARGIN / float(PAIRS - alike) / grown)
    weight[TOKENS.index(WRONG)] = 0


def _set(model: Any, token: str, place: int, text: str, chance: float) -> None:
    """Set one number of the output layer so that `token` follows on `text` with this chance."""
    ids = torch.tensor([make_tokenizer().encode(text, add_special_tokens=False)])
    row = model.lm_head.weight[TOKENS.index(token)]

    def reached(value: float) -> float:
        row[place] = value
        return float(model(ids).logits[0, -1].softmax(-1)[TOKENS.index(token)])

    row[place] = _solved(reached, chance)


def _solved(function: Callable[[float], float], goal: float) -> float:
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < goal else (low, middle)
    return low


def make(out: Path) -> None:
    """Write model and tokenizer to `out`."""
    torch.set_num_threads(1)  # so that the sums of floats, and with them the model, do not depend on the machine's cores
    torch.manual_seed(0)
    model = make_model()
    with whole_folder(out) as part:
        hide_bars()
        model.save_pretrained(part)
        make_tokenizer().save_pretrained(part)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
