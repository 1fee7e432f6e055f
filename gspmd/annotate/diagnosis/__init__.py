"""Why notation is refused: every fault of a text or of its sizes, with carets and remedies."""
