"""Keys and values that engines keep in FP8: half the memory of bfloat16, so twice the tokens at once and half to read."""
