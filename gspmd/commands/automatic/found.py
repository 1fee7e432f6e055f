"""A layout that was found for a run: its text, its mesh, and information on the search."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gspmd.commands.arguments import command_line, flag_of, without
from gspmd.display.units import amount_of_seconds
from gspmd.layouts import Layout
from gspmd.reading import ReadError, read_text
from gspmd.training import ConfigError
from gspmd.training.disk import write_whole
from gspmd.training.run.folder import newest_run
from gspmd.training.syntax import AUTO, lines_searched

FILE = "layout.toml"
"""The name of the layout's file in the folder of a run."""
COMMANDS = {"training": "gspmd train", "serving": "gspmd generate"}
"""A mapping from purpose to the command that finds a layout for this purpose and uses it."""


@dataclass(frozen=True)
class FoundLayout:
    """A layout that was found for a run.

    Attributes:
        text: the text of the layout's file.
        mesh: axes and sizes, such as `x=2,y=4`, in the form of `--mesh`; empty to leave the run's own mesh.
        seconds: predicted seconds of each program, by the program's name; empty if unknown.
        chip: the chip for which seconds were predicted.
        took: duration of the search in seconds.
        before: whether the layout was found by an earlier run.
        place: the path of the layout's file, or the reason why there is none.
    """

    text: str
    mesh: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    chip: str = ""
    took: float = 0.0
    before: bool = False
    place: str = ""

    @property
    def layout(self) -> Layout:
        """The layout itself, with the name `auto`."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / FILE
            path.write_text(self.text, encoding="utf-8")
            return replace(Layout.load(path), name=AUTO)

    def write(self, folder: Path, program: str = COMMANDS["training"], argv: Sequence[str] = ()) -> None:
        """Write the layout's file into a run's folder, either completely or not at all.

        Several runs may use the same found layout, so the comment in `text` does not name the command line of any run.
        The comment in the written file names the command line of this run. If the run is resumed, the comment already
        names a command line, and the file stays as it was.

        Args:
            folder: the run's folder.
            program, argv: the command line of the run.
        """
        path = folder / FILE
        given = without(argv, ("--distributed", "--layout", "--mesh"))
        if not any(flag_of(word) == "--resume" for word in argv):
            given = without(given, ("--out",))  # The other run's folder is its own.
        used = [*given, "--layout", str(path), *(("--mesh", self.mesh) if self.mesh else ())]
        commands = {"found with": without(argv, ("--distributed",)), "to be used": used}
        lines = "".join(f"# {name}    {program} {command_line(words)}\n" for name, words in commands.items())
        write_whole(path, self.text.replace(f"# {line_of_use(COMMANDS['training'], self.mesh)}\n", lines, 1))

    def __str__(self) -> str:
        if not self.seconds:
            return f"Layout: the run's own, {self.place}."
        times = " and ".join(f"{amount_of_seconds(each)} for a {what}" for what, each in self.seconds.items())
        how = f"found {'by an earlier run, ' if self.before else ''}in {amount_of_seconds(self.took)}"
        return f"Layout: {how}, for mesh {self.mesh}. Predicted: {times} on {self.chip}. The file is {self.place}."


def line_of_use(command: str, mesh: str) -> str:
    """Return the line in the comment of a layout file that says how any run of a command can use the layout."""
    return f"to be used    {command} ... --layout FILE --mesh {mesh}"


def asks_for_search(layout: str, doing: str) -> bool:
    """Return whether `--layout` asks for a search, for a model that comes with gspmd.

    The lines of such a model are known, so `--layout` must not name a file of lines.

    Args:
        layout: the value of the flag.
        doing: the first words of the error message.

    Raises:
        ConfigError: the flag names a file of lines, which is only for custom models.
    """
    if lines_searched(layout):
        fault = f"--layout {layout} is only for custom models, and this model comes with gspmd"
        raise ConfigError(doing, [f"{fault}: its lines are known without a file. Write --layout {AUTO}."])
    return layout == AUTO


def own(folder: Path) -> FoundLayout | None:
    """Return the layout that was found when the run in this folder began, or None if the folder has no file of it."""
    path = folder / FILE
    if not os.path.lexists(path):
        return None
    try:
        return FoundLayout(read_text(path), place=str(path))
    except ReadError as error:
        raise ConfigError("cannot read the run's layout:", [f"{str(path)!r}: {error}."]) from None


def own_of(out: str) -> FoundLayout | None:
    """Return the layout that was found for the run to be resumed: the run in this folder, by default the newest run."""
    return own(Path(out) if out else newest_run())
