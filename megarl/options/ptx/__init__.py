"""Supervised examples in every policy update: `ptx`."""
