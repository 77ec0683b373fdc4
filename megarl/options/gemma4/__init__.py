"""Gemma 4's text: inputs of every layer, keys and values of earlier layers, and a mixture beside the MLP."""
