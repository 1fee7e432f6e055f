"""How figures and tables are printed: on terminals, in files and in notebooks."""
