"""The loop, the steps that it names, a run and a session, and the protocols of what does the work."""
