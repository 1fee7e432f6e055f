"""The output of a run: metrics, events, tables, plots."""
