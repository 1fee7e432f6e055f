"""A page on this machine that plans equations and layouts as you type: `gspmd page`."""
