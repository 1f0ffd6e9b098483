"""Flag inventories of the targets, taken from their parsers."""
