"""The search over several pools of GPU types: parts, orders, one dynamic programme over layers and stages by type."""
