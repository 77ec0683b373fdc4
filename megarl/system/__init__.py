"""The operating system: files that appear whole, processes and how they end, and code of the user that is loaded."""
