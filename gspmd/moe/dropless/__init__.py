"""Dropless dispatch: rows sorted by expert, and the grouped products of such rows."""
