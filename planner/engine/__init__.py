"""The search of one set of pools: space, bounds, splits, finalists, options beyond the common ones."""
