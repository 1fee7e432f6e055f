"""Rendering of a chat template in a process of its own: `python rendering.py < REQUEST` answers with a line of JSON.

A template is a program that comes with a checkpoint. jinja2's sandbox keeps the template from files and from Python's
internals. Limits on the process keep the template from running forever, and from doubling a string forty times. This
file is run by its path, and imports only the standard library and jinja2, so that the process starts in a tenth of a
second.
"""

import contextlib
import json
import sys
from datetime import datetime
from types import TracebackType
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Render a template within the limits of a request.

    Args:
        request: a mapping with these keys: `template`, the source of the template; `variables`, the variables by name;
            `characters`, the largest number of characters that the template may write; `seconds` and `bytes`, the
            limits on the processor time and the memory of this process, or null where the system has no such limit;
            `path`, the folders that contain jinja2.

    Returns:
        A mapping with the `text`. If rendering fails, a mapping with the `error` and the `line` of the template that
        has the error, or 0 if this line is unknown.

    Example:
        >>> answer({"template": "{% for m in messages %}<{{ m.role }}>{% endfor %}", "path": sys.path,
        ...         "variables": {"messages": [{"role": "user"}]}, "characters": 100})
        {'text': '<user>'}
        >>> answer({"template": "a\\n{{ x.y.z }}", "path": sys.path, "variables": {}, "characters": 100})
        {'error': "'x' is undefined", 'line': 2}
    """
    sys.path += request["path"]
    try:
        import jinja2
    except ModuleNotFoundError:
        return {"error": "jinja2 is not installed; pip install 'jinja2>=3.1.6'", "line": 0}
    try:
        _limit(request.get("seconds"), request.get("bytes"))
        written, count = [], 0
        for piece in _environment().from_string(request["template"]).generate(**request["variables"]):
            count += len(piece)
            if count > request["characters"]:
                return {"error": f"it writes more than {request['characters']:,} characters", "line": 0}
            written.append(piece)
        text = "".join(written)
        text.encode()  # raises an error for half of a surrogate pair
        return {"text": text}
    except jinja2.TemplateSyntaxError as error:
        return {"error": _short(error.message), "line": error.lineno}
    except jinja2.TemplateError as error:
        return {"error": _short(error.message), "line": _line(error.__traceback__)}
    except MemoryError:
        most = request.get("bytes")
        bound = "memory than there is" if most is None else f"than {most:,} bytes of memory"
        return {"error": f"it takes more {bound}", "line": 0}
    except Exception as error:  # A template may make Python raise any exception.
        return {"error": _short(f"{type(error).__name__}: {error}"), "line": _line(error.__traceback__)}


def _short(message: Any) -> str:
    """Return the beginning of a message, because a template may have made the message very long."""
    return str(message)[:1000].encode("utf-8", "replace").decode()


def _limit(seconds: int | None, most: int | None) -> None:
    """Limit time and memory of this process, as far as the system can."""
    import resource

    for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, most), (resource.RLIMIT_FSIZE, 0)):
        if seconds is not None and limit is not None:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (limit, limit))


def _environment() -> Any:
    """Return a jinja2 environment like the one in which transformers renders chat templates."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `generation`, which marks the model's text for loss masks. Here the tag renders as its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

        def body(self, caller: Any) -> str:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **values: Any) -> None:  # `self` is a name that a template may use
            self, args = args[0], args[1:]
            super(Namespace, self).__init__({})
            for name, value in dict(*args, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"{name!r}, a name with an underscore, cannot be set")
            super().__setitem__(name, value)

    class Dict:
        """Python's dict, without access to its internals."""

        def __call__(self, *args: Any, **values: Any) -> dict:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict:
            return dict.fromkeys(*args)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson  # jinja2's own filter escapes HTML
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment


def _line(traceback: TracebackType | None) -> int:
    """Return the line of the template in which an error was raised."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
