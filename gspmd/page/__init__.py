"""A page on this machine that answers equations and layouts as one types: `gspmd page`."""
