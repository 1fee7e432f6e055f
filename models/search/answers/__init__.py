"""From a question to an answer: meshes of a slice, the best layout over them, its file, and why it is as it is.

Nothing here but `problem_of` knows of a particular phase: all else asks a `PhaseProblem`.
"""

from .candidate import Candidate
from .document import document
from .finding import Finding, NoneFits, Space, find
from .meshes import meshes
from .phases import problem_of

__all__ = ["Candidate", "Finding", "NoneFits", "Space", "document", "find", "meshes", "problem_of"]
