"""Engines that come and go while a run goes on: `rollout.engines: {min: 4, max: 64}`."""
