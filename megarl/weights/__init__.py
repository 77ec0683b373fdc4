"""Weights on their way from the training ranks to the engines: staged, sent, loaded, and checked by checksums."""
