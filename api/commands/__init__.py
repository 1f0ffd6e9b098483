"""One file a command. Only Typer is imported at the top of each; the rest loads when the command runs."""
