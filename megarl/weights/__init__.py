"""How weights travel from the training ranks to the engines: staged, sent, loaded, and checked by checksums."""
