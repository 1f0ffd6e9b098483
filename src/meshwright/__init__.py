"""Meshwright: an automatic parallelism planner for large-model training.

The rooms (``meshwright.specs``, ``.cost_models``, ``.profiler``, ``.planner``, ``.megatron_export``, ``.api``)
live in the top-level folders of the repository; ``pyproject.toml`` maps them here. This module stays empty so
that importing one room loads nothing of another.
"""
