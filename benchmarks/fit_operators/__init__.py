"""Fits of the operator constants that ship in cost_models/data, from the measured operators in benchmarks/data."""
