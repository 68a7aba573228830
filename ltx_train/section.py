"""The base of every settings object: frozen, unknown fields refused."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import nearest


class Section(BaseModel):
    """One part's settings: a frozen pydantic model in the file of the part that it sets up.

    Widgets, command line options, YAML, checks and help text are derived from its fields, so each field
    has a ``description``, bounds, and a default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=())


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
