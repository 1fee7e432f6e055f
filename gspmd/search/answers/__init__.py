"""Answers of a search: the meshes of a slice, the best layout over all of them, its file, and the reasons for it.

This code does not depend on the model and the phase, because it only uses a `PhaseProblem`.
"""

from gspmd.search.answers.candidate import Candidate
from gspmd.search.answers.document import document
from gspmd.search.answers.finding import NoneFits, SearchResult, Space, find
from gspmd.search.answers.meshes import factorings, meshes

__all__ = ["Candidate", "NoneFits", "SearchResult", "Space", "document", "factorings", "find", "meshes"]
