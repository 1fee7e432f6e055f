"""Chat templates of a checkpoint, which turn messages into text of the form that the model was trained on."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspmd.reading import ReadError, parse_json, read_text

from .files import CheckpointError
from .special import CONFIG

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
DEFAULT = "default"

_SECONDS = 10
"""The limit on a template's processor time, in seconds. Templates of published models take a few milliseconds."""
_BYTES = 2**30
_CHARACTERS = 2**24

_WATCHED = sys.platform == "darwin"
"""Whether gspmd itself checks the memory of a template's process.

It does on macOS, which accepts a limit on memory but does not enforce it.
"""
_PAUSE = 0.05
"""Time between two checks of the memory, in seconds. A process can fill about 100 MB in this time."""

#: The names under which the reasoning of a message is passed; a template reads one of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def read_templates(folder: Path, settings: Mapping[str, Any], doing: str) -> dict[str, str]:
    """Return the chat templates of a checkpoint by name; most checkpoints have one, called "default".

    The templates are in the files chat_template.jinja and additional_chat_templates/NAME.jinja. If there are no such
    files, they are in the entry `chat_template` of tokenizer_config.json.

    Raises:
        CheckpointError: a file cannot be read, or the entry is neither a string nor a list of named strings.
    """
    files = {DEFAULT: folder / FILE} if os.path.lexists(folder / FILE) else {}
    files |= {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if files:
        try:
            return {name: read_text(path) for name, path in files.items()}
        except ReadError as error:
            raise CheckpointError(doing, [f"a chat template cannot be read: {error}."]) from None
    match settings.get("chat_template"):
        case None:
            return {}
        case str(only):
            return {DEFAULT: only}
        case [*entries] if all(isinstance(_part(each, part), str) for each in entries for part in ("name", "template")):
            return {each["name"]: each["template"] for each in entries}
    fault = f'chat_template of {CONFIG} must be a string, or a list of {{"name": ..., "template": ...}}.'
    raise CheckpointError(doing, [fault])


def _part(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, dict) else None


def written(templates: Mapping[str, str]) -> dict[str, Any]:
    """Return the templates as entries of tokenizer_config.json."""
    if not templates:
        return {}
    if [*templates] == [DEFAULT]:
        return {"chat_template": templates[DEFAULT]}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def chosen(templates: Mapping[str, str], name: str, doing: str) -> str:
    """Return the name of the template to use: `name`, or "default" if `name` is empty.

    Raises:
        CheckpointError: there is no template with this name. The message lists the existing templates.
    """
    if (name or DEFAULT) in templates:
        return name or DEFAULT
    there = ", ".join(map(repr, templates))
    if not templates:
        fault = f"the tokenizer has no chat template: neither {FILE} nor chat_template in {CONFIG}. Add the file, or "
        fault += "continue a text that you write in the model's own form (--prompt without --chat)."
    elif name:
        fault = f"there is no chat template {name!r}; use one of {there}."
    else:
        fault = f"the chat templates are {there}, but none is the default; choose one (--chat-template NAME)."
    raise CheckpointError(doing, [fault])


def _run(command: list[str], request: str) -> subprocess.CompletedProcess[str]:
    """Run a process with a limit on its time, and return its output.

    On macOS, which does not enforce a limit on memory, the memory of the process is limited here too.

    Raises:
        subprocess.TimeoutExpired, MemoryError: the process exceeded a limit, and has been ended.
    """
    pipe, last = subprocess.PIPE, time.monotonic() + 6 * _SECONDS
    given: str | None = request
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_SYSTEM) as process:
        try:
            while True:
                left = last - time.monotonic()
                try:
                    out, said = process.communicate(given, timeout=min(left, _PAUSE) if _WATCHED else left)
                    return subprocess.CompletedProcess(command, process.returncode, out, said)
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= last:
                        raise
                if _resident(process.pid) > _BYTES:
                    raise MemoryError
                given = None  # the input has been passed already
        finally:
            process.kill()


def _resident(process: int) -> int:
    """Return the bytes of memory that a process uses, or 0 if it has ended."""
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True, env=_SYSTEM)
    return 1024 * int(shown.stdout.strip() or 0)


def render(source: str, name: str, variables: Mapping[str, Any], doing: str) -> str:
    """Render a template in a separate process, limited to 10 seconds, 1 GiB of memory and 16 million characters.

    The operating system enforces the limits, except that macOS does not limit memory. On macOS the memory of the
    process is checked twenty times a second, and the process is ended if it uses more than the limit. The process
    cannot write files. Only jinja2's sandbox keeps the template from reading files.

    Args:
        source: the template.
        name: the name of the template, for messages.
        variables: the variables that the template can read.
        doing: the first words of error messages.

    Raises:
        CheckpointError: the template is faulty, refuses the messages or exceeds a limit; or a variable is not plain
            data.
    """
    limits = {
        "seconds": _SECONDS,
        "bytes": None if _WATCHED else _BYTES,
        "characters": _CHARACTERS,
        "path": _folders("jinja2", "markupsafe"),
    }
    try:
        request = json.dumps(limits | {"template": source, "variables": variables})
    except (TypeError, ValueError) as error:
        raise CheckpointError(doing, [f"messages must be plain data, as in JSON: {error}."]) from None
    # -I and -S: the process ignores code in the caller's folder, PYTHON* variables and .pth files. It gets none of the
    # caller's environment variables, since some may be secrets.
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("rendering.py"))]
    try:
        ended = _run(command, request)
    except subprocess.TimeoutExpired:
        raise _faulty(name, f"it takes more than {6 * _SECONDS} seconds", 0, doing) from None
    except MemoryError:
        raise _faulty(name, f"it takes more than {_BYTES:,} bytes of memory", 0, doing) from None
    if ended.returncode == -signal.SIGXCPU:
        raise _faulty(name, f"it takes more than {_SECONDS} seconds", 0, doing)
    if ended.returncode == -signal.SIGKILL:
        raise _faulty(name, f"it takes more than {_SECONDS} seconds, or the system ran out of memory", 0, doing)
    try:
        answer = parse_json(ended.stdout)
    except ReadError:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise _faulty(name, f"its process ended without an answer ({last:.200})", 0, doing) from None
    if "text" not in answer:
        raise _faulty(name, answer["error"], answer["line"], doing)
    return answer["text"]


_SYSTEM = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}
"""The environment variables without which Windows starts no process."""


def _folders(*packages: str) -> list[str]:
    """Return the folders that must be on Python's path to import these packages."""
    found = [importlib.util.find_spec(name) for name in packages]
    own = [str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin]
    return list(dict.fromkeys(own))


def _faulty(name: str, fault: str, line: int, doing: str) -> CheckpointError:
    where = f", line {line}" if line else ""
    remedy = "Change the messages, use another template (--chat-template NAME), or write the text yourself (--prompt)."
    return CheckpointError(doing, [f"chat template {name!r}{where}: {fault.rstrip('.'):.1000}.", remedy])


def checked(messages: Sequence[Mapping[str, Any]], doing: str) -> list[dict[str, Any]]:
    """Return messages in the form that templates expect.

    Entries that are None are left out. If a message has the model's reasoning, the entries `thinking` and
    `reasoning_content` have it, since templates use both names.

    Raises:
        CheckpointError: there are no messages, or a message is not an object with a role.
    """
    if not messages:
        raise CheckpointError(doing, ["there are no messages; give at least one."])
    found = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            fault = f'message {number} is {message!r:.80}; it must be like {{"role": "user", "content": "..."}}.'
            raise CheckpointError(doing, [fault])
        given = {name: value for name, value in message.items() if value is not None}
        reasoning = next((given[name] for name in _REASONING if name in given), None)
        if reasoning is not None:
            given = {"thinking": reasoning} | given | {"reasoning_content": reasoning}
        found.append(given)
    return found
