"""Getting a run onto a machine: preflight (`doctor`) and, later, launchers."""
