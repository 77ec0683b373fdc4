"""The prompt groups that start, their engines and weights; engines that fail are restarted."""
