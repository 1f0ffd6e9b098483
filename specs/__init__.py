"""The nouns: models, clusters, workloads, targets, plans and estimates as typed, validated, serialisable data."""
