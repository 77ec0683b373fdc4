"""`megarl serve`: training and sampling of many adapters on one base model by the Tinker protocol (docs/serve.md)."""
