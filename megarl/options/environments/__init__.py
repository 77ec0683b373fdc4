"""Episodes in an environment: a class of the user, or a server of OpenEnv: `rollout.episode.kind: environment`."""
