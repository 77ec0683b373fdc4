"""Endpoints at which programs of the user's act: requests for chat completions in, tokens of the policy out, token for
token."""
