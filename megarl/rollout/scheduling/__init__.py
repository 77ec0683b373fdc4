"""Which prompt groups start, on which engine and under which weights; engines that fail are restarted."""
