"""Answers of `serve` to a change when a server is started again in its folder."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers, applied

AT_RESUME = answers(
    (
        "serve",
        APPLIED,
        "host port tenants tls_certificate tls_key models live_models snapshot_every_s idle_session_s max_body_bytes "
        "max_step_bytes max_waiting",
    ),
    ("serve", applied("models of more than that are refused when they are asked for"), "max_rank context_tokens full_weights"),
)
