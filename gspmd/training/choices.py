"""Parse flags with a few choices; an error names the nearest choice."""

import types
import typing
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from gspmd.training.toml import not_a_choice

#: For `tyro.cli(..., registry=REGISTRY)`: how `Literal`s and optional `Literal`s are parsed.
REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _literal(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    choices = choices_of(info.type)
    return _spec(choices) if choices else None


def choices_of(hint: Any) -> tuple:
    """Return the choices of a `Literal`, with None if it is optional; empty for any other type.

    >>> choices_of(typing.Literal["cpu", "gpu"] | None)
    (None, 'cpu', 'gpu')
    """
    arms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    literals = [arm for arm in arms if typing.get_origin(arm) is typing.Literal]
    if not literals or any(arm not in (*literals, types.NoneType) for arm in arms):
        return ()
    choices = [choice for arm in literals for choice in typing.get_args(arm)]
    return (None, *choices) if types.NoneType in arms else tuple(choices)


def _spec(choices: tuple) -> PrimitiveConstructorSpec:
    named = {str(choice): choice for choice in choices}

    def read(words: list[str]) -> Any:
        if words[0] not in named:
            raise ValueError(not_a_choice("it", words[0], tuple(named)))
        return named[words[0]]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(named) + "}",
        instance_from_str=read,
        is_instance=lambda value: value in choices,
        str_from_instance=lambda value: [str(value)],
    )
