"""The doors: CLI and REST service. Parse, call, present; no planning logic."""
