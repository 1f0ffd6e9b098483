"""Plan <-> files of each target, launchers."""
