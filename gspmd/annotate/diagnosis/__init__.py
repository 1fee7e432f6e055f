"""The diagnosis of refused notation: every fault of the text or of the sizes, with carets and remedies."""
