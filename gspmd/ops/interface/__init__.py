"""The common parts of operations: functions that read specs, arrays and options, and building blocks for plans."""
