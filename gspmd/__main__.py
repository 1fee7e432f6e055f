"""The start of a command: `python -m gspmd`, `gspmd`, and the files in scripts/ begin here.

While libraries are imported, an interrupt would end in a traceback, or would be taken for a missing module. SIGTERM
would end the process without a message. So this file first installs handlers that end the process with one line.
Nothing else imports this file: a program that uses gspmd as a library keeps its own handlers.
"""

import sys

from gspmd.interruption import end_at_once

end_at_once()

from gspmd.commands.main import main, script  # noqa: E402

__all__ = ["main", "script"]

if __name__ == "__main__":
    sys.exit(main())
