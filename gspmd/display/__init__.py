"""How figures and tables reach a reader."""
