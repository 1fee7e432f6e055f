"""The limits of the page: how much a request may contain, and how long an answer may take."""

BODY = 256 * 1024
"""The maximum size of a request's body, in bytes. The largest layout of a model has some 10 kB."""

TEXT = 400
"""The maximum number of characters of an equation, of its sizes, of a mesh, and of a via."""

AXES = 6
"""The maximum number of mesh axes.

With six, a search needs up to 15 seconds and 2 GB (docs/plans.md), and with seven far more.
"""

DEVICES = 2**17
"""The maximum number of devices of a mesh."""

SECONDS = 20.0
"""The maximum time that an answer may take, in seconds; the process of an answer that takes longer is ended."""

WAITING = 16
"""The maximum number of requests that may wait for an answer at the same time. A page sends one at a time."""

ALTERNATIVES = 6
"""The maximum number of alternatives to a plan that are listed."""

CONNECTIONS = 128
"""The maximum number of connections at the same time. A browser opens six."""

BODY_SECONDS = 10.0
"""The maximum time that the body of a request may take to arrive, in seconds."""

LINES = 8000
"""The maximum number of characters of all changed lines of a layout together."""

COUNT = 10**7
"""The maximum batch, length or number of microbatches."""

BASES = 16
"""The maximum number of files in a chain of layouts, each based on the next."""

LAYOUT_SECONDS = 120.0
"""The maximum time that the answer to a layout may take, in seconds. It is long because the model is traced."""

SEARCH_SECONDS = 900.0
"""The maximum time of a search or a compilation, in seconds; the page has a button that ends it sooner."""

BEATS = 0.5
"""Seconds between two lines of an answer that is sent part by part; sending a line shows if the page is still open."""
