"""Engines: what every one of them is (`protocol.py`), which there are (`registry.py`), and the engines themselves."""
