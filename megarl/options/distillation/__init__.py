"""Teachers whose log-probs the policy learns from: `teacher` and `algorithm.distillation`."""
