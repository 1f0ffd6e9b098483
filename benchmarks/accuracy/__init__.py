"""The accuracy page: statistics, tables and charts of predictions of runs that took no part in a fit."""
