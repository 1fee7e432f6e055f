"""Every planned step of a whole function."""
