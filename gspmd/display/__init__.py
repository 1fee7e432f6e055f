"""Figures and tables, printed on terminals, in files and in notebooks."""
