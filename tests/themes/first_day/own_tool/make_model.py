"""Writes `model`, a tiny random Llama with a chat template, and `chats.jsonl`, conversations with a tool.

In half of the conversations the assistant asks the tool, in the others it guesses wrongly.
"""

import json
import re
from pathlib import Path

import torch
from my_tool import STOCK, stock
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
PIECE = r"</?tool_call>|[A-Za-z]+|[\s\S]"


def conversation(item, *, guesses):
    """One question, answered by asking the tool or by a guess."""
    question = {"role": "user", "content": f"How many {item} are left?"}
    if guesses:
        return [question, {"role": "assistant", "content": str(STOCK[item] + 1)}]
    call = {"type": "function", "function": {"name": "stock", "arguments": {"item": item}}}
    told = str(STOCK[item])
    answer = [{"role": "tool", "content": told}, {"role": "assistant", "content": told}]
    return [question, {"role": "assistant", "tool_calls": [call]}, *answer]


rows = [
    {"messages": conversation(item, guesses=guesses), "tools": [get_json_schema(stock)]}
    for item in STOCK
    for guesses in (False, True)
]
Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
questions = [{"question": f"How many {item} are left?", "answer": str(left)} for item, left in STOCK.items()]
Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))

pieces = re.findall(PIECE, "system user assistant tool error no such 0123456789" + json.dumps(rows))
words = list(dict.fromkeys([*SPECIAL, "<tool_call>", "</tool_call>", "\n", *pieces]))
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
tokenizer.decoder = decoders.Fuse()
tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<pad>", chat_template=TEMPLATE
).save_pretrained("model")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("model")
