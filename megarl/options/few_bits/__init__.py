"""Weights in few bits: the formats of engines and folders (FP8, MXFP8, INT4, MXFP4), and experts trained for INT4."""
