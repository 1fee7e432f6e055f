"""The limits of a request to the page: what may be sent, and how long an answer may take."""

BODY = 256 * 1024
"""Bytes of a request. The largest layout of a model has some 10 kB."""

TEXT = 400
"""Characters of an equation, of its sizes, of a mesh, of a via."""

AXES = 6
"""Mesh axes: with six a search takes up to 15 seconds and 2 GB (docs/plans.md), and with seven far more."""

DEVICES = 2**17
"""Devices of a mesh."""

SECONDS = 20.0
"""Seconds of an answer; after them its process is ended."""

WAITING = 16
"""Requests that wait for an answer at the same time. A page asks for one at a time."""

ALTERNATIVES = 6
"""Alternatives to a plan that are listed."""

CONNECTIONS = 128
"""Connections at the same time. A browser opens six."""

BODY_SECONDS = 10.0
"""Seconds in which the body of a request has to arrive."""

LINES = 8000
"""Characters of the changed lines of a layout, together."""

COUNT = 10**7
"""The largest batch, length or number of microbatches."""

BASES = 16
"""Files on which a layout may be based, one upon the other."""

LAYOUT_SECONDS = 120.0
"""Seconds of the answer to a layout, whose model is traced."""

SEARCH_SECONDS = 900.0
"""Seconds of a search, and of a compilation; the page has a button that ends them sooner."""

BEATS = 0.5
"""Seconds between two lines of an answer that is told part by part, so that a page that has gone is noticed."""
