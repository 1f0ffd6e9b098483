"""Our search with the costs of other planners, on their inputs, judged by their own cost models."""
