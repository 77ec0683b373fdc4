"""The rewards that megarl brings, one file for each name in the config."""
