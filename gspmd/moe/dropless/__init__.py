"""Dropless dispatch: rows of tokens sorted by expert, and grouped products of such rows with the experts' weights."""
