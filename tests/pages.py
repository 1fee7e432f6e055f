"""Run the code blocks of a page as a reader would: as printed, each in a separate process.

    python -m tests.pages README.md                run every block of a page except the slow ones
    python -m tests.pages --slow README.md         and those too
    python -m tests.pages --write README.md        and replace the outputs on the page by those of the blocks

What is run, by the language behind the fence:

- `python`: a block stands alone, with its own imports and devices, so that a reader can begin there. A block without a
  language right below it shows its output, with `...` for any text. If a release of JAX prints something else, "Since
  JAX 0.12:" and a second such block follow. A session (`>>>`) is a doctest, and continues the page's last one.
- `sh`: in the shell, in a folder that has the project's files; a block without a language right below it is the output.
- `toml` is parsed. `text`, `console` and `ebnf` are not checked.

A comment on the line above a block changes that, and says why:

    <!-- saved as mixer.py -->               not run: the blocks below find it as that file
    <!-- run slow: ... -->                   not in the fast suite
    <!-- run slow, needs libtpu: ... -->     and only where the compiler for TPUs is installed
    <!-- run slow, with --steps 2: ... -->   with flags behind each of its commands
    <!-- run never: ... -->
"""

import doctest
import io
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ_ONLY = ("text", "console", "ebnf")
_FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(
    r"<!-- run (?P<when>never|slow)(?P<tpu>, needs libtpu)?(?:, with (?P<flags>[^:]+))?: (?P<reason>[^\n]+) -->\n$"
)
_SAVED = re.compile(r"<!-- saved as (?P<name>[\w.]+) -->\n$")
_ALONE = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__'})"
_SINCE = re.compile(r"\s*Since JAX (?P<release>[\d.]+):\s*")
_DIFFERS = "it shows"
_SESSION = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        line: number of its first line of code.
        language: the language behind the fence.
        when: "fast", "slow" or "never"; `reason` says why it is not fast.
        flags: the flags that are added to each command of a shell.
        needs_libtpu: whether it compiles for TPUs.
        shown: the output that the page shows below it for the installed JAX, None if it shows none.
        span: the place of that output in the page.
        file: the name that its code is saved under, in place of running it.
    """

    line: int
    language: str
    code: str
    when: str = "fast"
    reason: str = ""
    flags: str = ""
    needs_libtpu: bool = False
    shown: str | None = None
    span: tuple[int, int] = (0, 0)
    file: str = ""

    @property
    def is_run(self) -> bool:
        """Whether it is run in some suite, fast or slow."""
        return self.language in ("python", "sh") and self.when != "never" and not self.file


def blocks_of(text: str) -> tuple[list[Block], list[str]]:
    """Return the blocks of a page in their order, and the faults of all of them."""
    blocks, faults, end = [], [], 0
    for each in _FENCE.finditer(text):
        language, code = each["language"].strip(), each["code"]
        line = text.count("\n", 0, each.start("code")) + 1
        above = text[text.rfind("\n", 0, max(each.start() - 1, 0)) + 1 : each.start()]
        marked, saved = _MARK.match(above), _SAVED.match(above)
        between = text[end : each.start()]
        is_output = not language and blocks and blocks[-1].language in ("python", "sh")
        since = _SINCE.fullmatch(between) if is_output and blocks[-1].shown is not None else None
        if since:
            if _release(version("jax")) >= _release(since["release"]):
                blocks[-1] = replace(blocks[-1], shown=code, span=each.span("code"))
        elif is_output and not between.strip():
            blocks[-1] = replace(blocks[-1], shown=code, span=each.span("code"))
        elif language not in ("python", "sh", "toml", *READ_ONLY):
            faults.append(f"line {line}: a block of {language or 'no language'}: write ```text where nothing is run")
        else:
            given = marked.groupdict() if marked else {}
            blocks.append(
                Block(
                    line,
                    language,
                    code,
                    given.get("when") or "fast",
                    given.get("reason") or "",
                    given.get("flags") or "",
                    bool(given.get("tpu")),
                    file=saved["name"] if saved else "",
                )
            )
        if above.startswith("<!-- run") and not marked:
            faults.append(f"line {line}: cannot read the comment above it: {above.strip()}")
        end = each.end()
    return blocks, faults


def _release(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


class Page:
    """A page whose blocks are run; its session, in this process.

    Processes are given `os.environ`. Otherwise they would inherit a width of 80 columns, which readline sets in the C
    library only; doctest loads readline since Python 3.13.
    """

    def __init__(self, path: Path, folder: Path):
        self.path, self.folder, self.session = path, folder, {"__name__": "__main__"}

    def run(self, block: Block) -> tuple[str, str]:
        """Run the block; return its output, and the fault of that output."""
        if block.file:
            Path(self.folder, block.file).write_text(block.code)
        if block.language == "toml":
            try:
                tomllib.loads(block.code)
            except tomllib.TOMLDecodeError as error:
                return "", f"TOMLDecodeError: {error}"
            return "", ""
        if block.file:
            return "", ""
        if block.language == "sh":
            return self._shell(block)
        return self._session(block) if ">>> " in block.code else self._code(block)

    def _code(self, block: Block) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", _ALONE, f"{self.path.stem}.py"], input=block.code,
            cwd=self.folder, capture_output=True, text=True, check=False, env={**os.environ},
        )  # fmt: skip
        if done.returncode:
            return done.stdout, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
        if done.stdout and block.shown is None:
            return done.stdout, f"it prints what the page does not show:\n{done.stdout}"
        return done.stdout, _difference(block, done.stdout)

    def _session(self, block: Block) -> tuple[str, str]:
        test = doctest.DocTestParser().get_doctest(block.code, self.session, self.path.name, str(self.path), block.line)
        runner, out = doctest.DocTestRunner(optionflags=_SESSION), io.StringIO()
        runner.run(test, out=out.write, clear_globs=False)
        self.session.update(test.globs)
        return "", out.getvalue()

    def _shell(self, block: Block) -> tuple[str, str]:
        code = re.sub(r"(?<!\\)\n", lambda end: f" {block.flags}\n", block.code) if block.flags else block.code
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code], cwd=self.folder, capture_output=True, text=True, check=False,
            env={**os.environ},
        )  # fmt: skip
        if done.returncode:
            return done.stdout, f"{code}exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout, _difference(block, done.stdout) if block.shown is not None else ""


def _difference(block: Block, printed: str) -> str:
    shown, printed = block.shown or "", _tidy(printed)
    if doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS):
        return ""
    return f"{_DIFFERS}\n{shown}and prints\n{printed}"


def _tidy(printed: str) -> str:
    """Return the text without the spaces and empty lines at ends, which no page shows."""
    lines = [line.rstrip() for line in printed.splitlines()]
    return "\n".join(lines).strip("\n") + "\n" if any(lines) else ""


def run_page(path: Path, *, slow: bool, write: bool) -> int:
    """Run a page's blocks, and print their faults; return the number of blocks with a fault."""
    text, wrong, outputs = path.read_text(), 0, []
    blocks, faults = blocks_of(text)
    with tempfile.TemporaryDirectory() as folder:
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") and entry.name != "runs":
                Path(folder, entry.name).symlink_to(entry)
        os.chdir(folder)
        page = Page(path, Path(folder))
        for block in blocks:
            where, why = f"{path.name}:{block.line}", _why_not(block, slow)
            if why:
                print(f"{where}: not run, {why}")
                continue
            printed, fault = page.run(block)
            if not fault or fault.startswith(_DIFFERS):  # a page never shows half the output of a block that failed
                outputs.append((block, printed))
            wrong += bool(fault)
            print(f"{where}: {fault or 'runs'}", flush=True)
        os.chdir(ROOT)
    for fault in faults:
        print(f"{path.name}, {fault}")
    if write:
        for block, printed in reversed(outputs):
            if block.shown is not None and "..." not in block.shown:
                text = text[: block.span[0]] + _tidy(printed) + text[block.span[1] :]
        path.write_text(text)
    return wrong + len(faults)


def _why_not(block: Block, slow: bool) -> str:
    if block.language in READ_ONLY:
        return f"it is {block.language}"
    if block.when == "never" or (block.when == "slow" and not slow):
        return f"{block.when}: {block.reason}"
    if block.needs_libtpu and find_spec("libtpu") is None:
        return "libtpu, the TPU compiler, is not installed"
    return ""


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    pages = [Path(argument).resolve() for argument in sys.argv[1:] if not argument.startswith("--")]
    sys.exit(min(1, sum(run_page(page, slow="--slow" in options, write="--write" in options) for page in pages)))
