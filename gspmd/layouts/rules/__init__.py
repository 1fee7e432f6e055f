"""The keys that a layout may have, and the rules by which its specs are checked."""
