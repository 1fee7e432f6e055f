"""The limits of the page: the most that a request may contain, and the longest time that an answer may take."""

BODY = 256 * 1024
"""The most bytes of a request's body. The largest layout of a model has some 10 kB."""

TEXT = 400
"""The most characters of an equation, of its sizes, of a mesh, and of a via."""

AXES = 6
"""The most mesh axes: with six, a search needs up to 15 seconds and 2 GB (docs/plans.md), and with seven far more."""

DEVICES = 2**17
"""The most devices of a mesh."""

SECONDS = 20.0
"""The most seconds that an answer may take; then its process is ended."""

WAITING = 16
"""The most requests that may wait for an answer at the same time. A page sends one at a time."""

ALTERNATIVES = 6
"""The most alternatives to a plan that are listed."""

CONNECTIONS = 128
"""The most connections at the same time. A browser opens six."""

BODY_SECONDS = 10.0
"""The most seconds that the body of a request may take to arrive."""

LINES = 8000
"""The most characters of all changed lines of a layout together."""

COUNT = 10**7
"""The largest batch, length or number of microbatches."""

BASES = 16
"""The most files in a chain of layouts, each based on the next."""

LAYOUT_SECONDS = 120.0
"""The most seconds that the answer to a layout may take; it takes long because the model is traced."""

SEARCH_SECONDS = 900.0
"""The most seconds of a search or a compilation; the page has a button that ends it sooner."""

BEATS = 0.5
"""Seconds between two lines of an answer that is sent part by part; these show whether the page is still open."""
