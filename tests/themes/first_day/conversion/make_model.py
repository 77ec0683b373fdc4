"""Writes `model`: a random Llama of 60 MB, large enough that a conversion can be caught at work."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=8192, hidden_size=320, intermediate_size=896, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4
)
AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("model")
AutoTokenizer.from_pretrained("models/tiny-arithmetic").save_pretrained("model")
