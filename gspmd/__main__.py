"""`python -m gspmd`, which is `gspmd`."""

import sys

from gspmd.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
