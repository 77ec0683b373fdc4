"""Things that a run of any kind keeps, such as checkpoints, guards and a timeline, and the training side as it sees it."""
