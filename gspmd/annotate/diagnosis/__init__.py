"""The diagnosis of notation with errors: every fault of the text or of the sizes, with carets and remedies."""
