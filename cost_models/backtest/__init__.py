"""Published training runs: read, priced, compared. Also the source of calibrations."""
