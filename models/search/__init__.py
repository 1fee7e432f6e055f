"""Layouts found: the search problems of a model's phases, and their answers as layouts."""
