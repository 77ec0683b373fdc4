"""Linear attention in place of attention (Qwen3-Next, Qwen3.5, Kimi-Linear, OLMo hybrid): layers, tokens, families."""
