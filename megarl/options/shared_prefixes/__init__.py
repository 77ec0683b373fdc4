"""Tokens that sequences begin with alike, computed once: `policy.share_prefix`."""
