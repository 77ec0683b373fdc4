"""The training side: model roles built on megatron-core. Call `megarl.platform.install()` before importing from here."""
