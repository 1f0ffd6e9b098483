"""Plan -> seconds and bytes: operators, collectives, memory, schedules, step."""
