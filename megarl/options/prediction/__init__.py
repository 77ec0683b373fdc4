"""The layer for multi-token prediction (`policy.mtp`), and drafts of speculative decoding (`rollout.speculative`)."""
