"""Mamba-2 layers in place of attention (Granite 4 hybrid, Nemotron-H): layers, the order of tokens, and families."""
