"""The base of every settings object: frozen, unknown fields refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from .errors import nearest


class Section(BaseModel):
    """One part's settings: a frozen pydantic model in the file of the part that it sets up.

    Widgets, command line options, YAML, checks and help text are derived from its fields, so each field
    has a ``description``, bounds, and a default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, data: Any) -> Any:
        """Refuse ``rank: true``, which pydantic and Python would take for 1; each fault stands at its own field."""
        if not isinstance(data, Mapping):
            return data
        told = PydanticCustomError("number_expected", "Input should be a number, not true or false")
        found = [
            InitErrorDetails(type=told, loc=(name, *place), input=truth)
            for name, value in data.items() if isinstance(name, str)
            for place, truth in _truths(value) if _takes_numbers(cls, name)
        ]  # fmt: skip
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return data


def _truths(value: Any) -> Iterator[tuple[tuple[int | str, ...], bool]]:
    """The booleans in a value and where they stand, through lists and mappings; ``()`` is the value itself."""
    if isinstance(value, bool):
        yield (), value
    elif isinstance(value, list | tuple | Mapping):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from (((key if isinstance(key, int | str) else str(key), *place), truth) for place, truth in _truths(item))


def _takes_numbers(section: type[BaseModel], name: str) -> bool:
    """Whether a field is made of numbers, in whatever lists or unions, and of nothing that may be or hold a truth value."""
    leaves = list(_leaves(section.model_fields[name].annotation)) if name in section.model_fields else []
    truths = any(leaf in (bool, Any) or isinstance(leaf, bool) or (isinstance(leaf, type) and issubclass(leaf, BaseModel)) for leaf in leaves)
    return not truths and any(leaf in (int, float) for leaf in leaves)


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types at the ends of an annotation; of ``Literal`` its values, of ``Annotated`` its notes too."""
    parts = get_args(annotation)
    if not parts:
        yield annotation
    for part in parts:
        yield from _leaves(part)


Kind = TypeVar("Kind", bound=Section)


def parse_parameters(kind: type[Kind], title: str, values: dict[str, Any]) -> Kind:
    """``values`` (the free mapping of another section's field) as ``kind``; ValueError naming the first fault, or the nearest known name."""
    for name in values:
        if name not in kind.model_fields:
            near = nearest(name, list(kind.model_fields)) or list(kind.model_fields)
            raise ValueError(f"{title} has no parameter {name!r}; known: {', '.join(near) or 'none'}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place, what = ".".join(str(p) for p in first["loc"]), first["msg"].removeprefix("Value error, ")
        shown = "" if first["type"] in ("value_error", "missing") else f", got {first['input']!r}"
        raise ValueError(f"{title}{', ' if place else ''}{place}: {what}{shown}") from error
