"""Planning cases, what the planner makes of them, and what it gains over four simpler ways to plan."""
