"""The output of a run: metrics, TensorBoard events, tables and plots."""
