"""Experts of tokens as an engine, or an earlier pass, chose them: `policy.routing`."""
