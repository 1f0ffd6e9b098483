"""Keys and recipes of Megatron-Bridge, taken from its package by .ci/bridge."""
