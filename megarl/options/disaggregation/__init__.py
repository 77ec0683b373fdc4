"""Prefill and decoding on engines of their own, by SGLang's disaggregation."""
