"""The start of a command: `python -m gspmd`, `gspmd`, and the files in scripts/ begin here.

An interrupt while libraries are imported would end in a traceback, or be taken for a missing module, and SIGTERM would
end the process without a word. So the first thing this file does is to install handlers that end the process with one
line. Nothing else imports this file: a program that uses gspmd as a library keeps its own handlers.
"""

import sys

from gspmd.interruption import end_at_once

end_at_once()

from gspmd.commands.main import main, script  # noqa: E402

__all__ = ["main", "script"]

if __name__ == "__main__":
    sys.exit(main())
