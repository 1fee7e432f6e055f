"""Finding a custom model by its name, such as `mixer:Mixer`: the module is imported, and the class is checked."""

import dataclasses
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from gspmd.annotate.errors import listed
from gspmd.training.toml import ConfigError, Dataclass

T = TypeVar("T", bound=Dataclass)

METHODS = {
    "sizes": ("batch", "length"),
    "parameters": ("layout",),
    "loss": ("layout", "params", "tokens", "key", "train"),
}
"""Methods that a class needs to be a `gspmd.training.model.Model`, with the arguments that each is called with."""
_MORE = {"flops_per_token": ("length",)}
"""Optional methods of such a class, with the arguments that each is called with."""
_DECODING = {"kept": (), "step": ("layout", "params", "tokens", "position", "kept")}
"""The two methods of a class that decodes, with the arguments that each is called with."""
_NAME = re.compile(r"(?P<folder>(?:.*/)?)(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")


_FOLDERS: set[Path] = set()
"""The folders that hold the imported modules of custom models.

If the code of a module raised an error during import, the folder in which the module was looked for is here too.
"""
_MOST_FRAMES, _MOST_LINES = 3, 3


def find(name: str) -> type:
    """Return the class of a custom model, given its name.

    Args:
        name: `module:Name`, or `folder/module:Name`. The module is first looked for in `folder` (by default the current
            folder), and then where Python looks for modules.

    Raises:
        ConfigError: the module does not exist or has nothing of this name, or the object of this name is not a model.
    """
    doing = f"cannot use the model {name!r}:"
    match = _NAME.fullmatch(name.replace(".py:", ":"))
    if not match:
        raise ConfigError(doing, ["a model is named MODULE:NAME, such as mixer:Mixer for the class Mixer of mixer.py."])
    module = _imported(doing, match["module"], Path(match["folder"]))
    found = getattr(module, match["name"], None)
    if found is None:
        near = get_close_matches(match["name"], [key for key in vars(module) if not key.startswith("_")], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(doing, [f"{module.__file__} has no {match['name']!r}.{hint}"])
    if faults := _faults(found):
        raise ConfigError(doing, faults)
    return found


def _imported(doing: str, name: str, folder: Path) -> ModuleType:
    where = str(folder.resolve())
    if where not in sys.path:
        sys.path.insert(0, where)
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            near = get_close_matches(name, [path.stem for path in Path(where).glob("*.py")], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            fault = f"there is no module {name!r} in {where!r}, nor where Python looks for modules.{hint}"
            raise ConfigError(doing, [fault]) from None
        raise ConfigError(doing, [f"its module imports {error.name!r}, which is not installed."]) from None
    except SyntaxError as error:
        raise ConfigError(
            doing, [f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"]
        ) from None
    except Exception as error:
        _FOLDERS.add(Path(where))
        if blame := blamed(error):
            raise ConfigError(doing, blame) from None
        raise
    if module.__file__:
        _FOLDERS.add(Path(module.__file__).resolve().parent)
    there = _file(name, folder)
    if there and module.__file__ and not Path(module.__file__).resolve().is_relative_to(there.resolve()):
        fault = f"Python already has another module {name!r}, {module.__file__}; give the file another name."
        raise ConfigError(doing, [fault])
    return module


def blamed(error: BaseException) -> list[str]:
    """Return lines with an error and its place in a custom model's code, or [] if the model is not to blame.

    An error that JAX or Python raises in a model's code is for the user to correct, but most frames of its traceback
    belong to libraries. If the innermost frame outside of libraries is in gspmd, gspmd is at fault, and the model is
    not blamed.
    """
    package = Path(__file__).resolve().parents[2]
    frames = [(Path(frame.filename).resolve(), frame) for frame in traceback.extract_tb(error.__traceback__)]
    known = [(path, frame) for path, frame in frames if path.is_relative_to(package) or path.parent in _FOLDERS]
    if not known or known[-1][0].is_relative_to(package):
        return []
    frames = [frame for path, frame in known if not path.is_relative_to(package)]
    at = [f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-_MOST_FRAMES:]]
    said = f"{type(error).__name__}: {error}".splitlines()
    return [*at, *said[:_MOST_LINES], *(["..."] if len(said) > _MOST_LINES else [])]


def _file(module: str, folder: Path) -> Path | None:
    """Return a module's file or its package's folder inside `folder`, or None if neither exists."""
    top = folder / module.partition(".")[0]
    return next((path for path in (top.with_suffix(".py"), top) if path.exists()), None)


def _faults(found: Any) -> list[str]:
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        return ["it is not a dataclass; write @dataclass(frozen=True) above the class, whose fields are the settings."]
    faults = []
    if missing := [each for each in METHODS if not callable(getattr(found, each, None))]:
        faults.append(f"it is not a model: it lacks {listed(missing)} of the protocol gspmd.training.model.Model.")
    decodes = all(callable(getattr(found, each, None)) for each in _DECODING)
    methods = METHODS | _MORE | (_DECODING if decodes else {})
    faults += [fault for name, given in methods.items() if (fault := _fault_of_call(found, name, given))]
    # The standard library has no function for this, and its type stubs lack the attribute.
    if not found.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        faults.append("its settings could change; write @dataclass(frozen=True).")
    faults += [
        f"field {each.name!r} has no default; give it one, which --model.{each.name} replaces."
        for each in dataclasses.fields(found)
        if each.init and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    ]
    return faults


def _fault_of_call(found: type, name: str, given: Sequence[str]) -> str:
    """Return the fault if a method of a class cannot be called with the given arguments.

    The result is "" if the method can be called, or if the class has no such method.
    """
    method = getattr(found, name, None)
    if not callable(method):
        return ""
    bound = isinstance(inspect.getattr_static(found, name), staticmethod | classmethod)
    try:
        signature = inspect.signature(method)
        signature.bind(*(() if bound else ("self",)), *given)
    except ValueError:  # A callable whose arguments are not known.
        return ""
    except TypeError:
        wanted = ", ".join((*(() if bound else ("self",)), *given))
        return f"its {name} must be {name}({wanted}), but is {name}{signature}."
    return ""


def beside(name: str, folder: Path) -> str:
    """Put a folder in front of a model's name if the model's module is in this folder.

    >>> beside("mixer:Mixer", Path("there"))
    'mixer:Mixer'
    """
    name = name.replace(".py:", ":")
    match = _NAME.fullmatch(name)
    return os.path.join(folder, name) if match and _file(match["module"], folder / match["folder"]) else name


def typed_with(cls: type[T], model: type) -> type[T]:
    """Return a copy of a settings class whose field `model` has the type `model`."""
    fields = [("model", model, dataclasses.field(default_factory=model))]
    typed = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True)
    typed.__doc__, typed.__module__ = cls.__doc__, cls.__module__
    return typed


def with_model(
    cls: type[T], values: Mapping[str, Any], given: str = "", folder: Path = Path(), *, again: bool = False
) -> tuple[type[T], dict[str, Any]]:
    """Return a settings class with the fields of the requested custom model, and the values for this class.

    The name of the model moves from `class` in the table `model` to the key `model_class`. If no custom model is
    requested, class and values are returned unchanged.

    Args:
        cls: a dataclass with the fields `model`, for settings of a built-in model, and `model_class`.
        values: the values of a settings file, or of a run; the key `class` in the table `model` names the model.
        given: the name of a custom model in the flags. It takes precedence over the one in `values`.
        folder: the folder that contains the settings file.
        again: whether a run is resumed. If so, `given` must be empty, or name the model of that run.

    Raises:
        ConfigError: there is no such model (see `find`), or the run has a different model.
    """
    table = values.get("model", {})
    written = table.get("class", "") if isinstance(table, Mapping) else ""
    if "model_class" in values:
        raise ConfigError("cannot read the settings:", ["unknown key 'model_class'; write class in [model]."])
    if not isinstance(written, str):
        raise ConfigError("cannot read the settings:", [f"model.class must be a string, but is {written!r}."])
    if again and given and os.path.abspath(beside(given, Path.cwd())) != os.path.abspath(written or "."):
        was = f"the model {written!r}" if written else "one of the models that come with gspmd"
        raise ConfigError("cannot resume:", [f"the run has {was}, not {given!r}; leave --model out."])
    if not (name := given or written):
        return cls, dict(values)
    typed = typed_with(cls, find(given or beside(written, folder)))
    of_model = {key: value for key, value in table.items() if key != "class"}
    training = values.get("training", {})
    if isinstance(training, Mapping):  # `gspmd train` samples no text from a custom model.
        training = {"sample_bytes": 0, **training}
    return typed, {**values, "model_class": name, "model": of_model, "training": training}
