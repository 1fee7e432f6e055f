"""Run the notebooks of docs/tour/, whose outputs are kept in them.

After a change of what they print, renew the outputs, and look at them:

    python -m tests.notebooks [NAME ...]
"""

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

TOUR = Path(__file__).parents[1] / "docs" / "tour"
NAMES = ("notation", "one-or-two", "looped", "mixture", "will-it-fit", "own-model")  # in the order of reading
# Addresses, folders and measured seconds, which differ from run to run.
_PASSING = re.compile(r"0x[0-9a-f]+|/tmp/\S+|\bin +\d+(\.\d+)? (ms|s)\b")


def read(name):
    """Return a notebook as it is kept."""
    return nbformat.read(TOUR / f"{name}.ipynb", as_version=4)


def run(name):
    """Return a notebook with the outputs that it has now; it runs in an empty folder.

    Raises:
        CellExecutionError: for a cell that fails.
    """
    book = read(name)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # the gspmd of this environment
        "COLUMNS": "100", "JAX_PLATFORMS": "cpu", "NO_COLOR": "1",
    }  # fmt: skip
    environment.pop("XLA_FLAGS", None)  # a notebook says itself how many devices it wants
    with TemporaryDirectory() as folder:
        client = NotebookClient(book, timeout=1200, coalesce_streams=True, resources={"metadata": {"path": folder}})
        # A kernel asks commands for the colors of a terminal, whose codes would be kept as text.
        plain = "import os\nfor name in ('FORCE_COLOR', 'CLICOLOR_FORCE', 'CLICOLOR'): os.environ.pop(name, None)"
        book.cells.insert(0, nbformat.v4.new_code_cell(plain))
        with client.setup_kernel(env=environment):
            for number, cell in enumerate(book.cells):
                client.execute_cell(cell, number, store_history=number > 0)  # the first cell is not counted
        del book.cells[0]
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":
            # Progress and warnings of libraries, which come or not.
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return book


def outputs(book):
    """Return the text and HTML that each cell of code shows, with addresses, folders and measured seconds masked."""
    shown = []
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        texts = []
        for output in cell.outputs:
            if output.output_type == "stream":
                texts += [output.text] if output.name != "stderr" else []
            else:
                texts += [output.data[kind] for kind in ("text/plain", "text/html") if kind in output.data]
        shown.append(_PASSING.sub("…", "".join(texts)))
    return shown


def renew(name):
    """Run a notebook and keep its outputs."""
    nbformat.write(run(name), TOUR / f"{name}.ipynb")


if __name__ == "__main__":
    for each in sys.argv[1:] or NAMES:
        print(each, flush=True)
        renew(each)
