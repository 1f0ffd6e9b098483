"""Request -> best plans: target rules, space, bounds, partition, placement, search, explanation."""
