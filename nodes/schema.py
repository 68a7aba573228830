"""Settings sections as ComfyUI inputs, and what comes back from the widgets as a section's fields."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from comfy_api.latest import io
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..ltx_train.errors import ConfigError
from ..ltx_train.section import Section

BIG = 2**31 - 1
NOT_SET = "not set"
# Widgets hold 64-bit seeds exactly up to this.
MAX_SEED = 2**53 - 1


class Kind:
    """What a field's annotation says: its base type, whether None is allowed, its choices."""

    def __init__(self, info: FieldInfo) -> None:
        members = list(_members(info.annotation))
        self.optional = type(None) in members
        members = [m for m in members if m is not type(None)]
        self.choices = [value for m in members if get_origin(m) is Literal for value in get_args(m)]
        listed = (info.json_schema_extra or {}).get("enum") if isinstance(info.json_schema_extra, dict) else None
        if listed:
            self.choices, self.optional = [v for v in listed if v is not None], self.optional or None in listed
        plain = [m for m in members if get_origin(m) is not Literal]
        self.type: Any = plain[0] if plain else None
        self.origin = get_origin(self.type)
        low, high, self.open_low, self.open_high = -BIG, BIG, False, False
        for bound in info.metadata:
            for name in ("ge", "gt"):
                if getattr(bound, name, None) is not None:
                    low, self.open_low = getattr(bound, name), name == "gt"
            for name in ("le", "lt"):
                if getattr(bound, name, None) is not None:
                    high, self.open_high = getattr(bound, name), name == "lt"
        self.low, self.high = low, high

    @property
    def is_number(self) -> bool:
        return self.type in (int, float) and not self.choices

    @property
    def unset(self) -> int:
        """The widget's value that stands for None: below what the field allows."""
        return 0 if self.low > 0 or (self.low == 0 and self.open_low) else -1


def _members(annotation: Any) -> Iterable[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation


def is_section(annotation: Any) -> type[Section] | None:
    """The section class of a nested field, or None."""
    found = [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, Section)]
    return found[0] if found else None


def fields_of(section: type[Section], only: Iterable[str] | None = None, leave: Iterable[str] = ()) -> dict[str, FieldInfo]:
    """The fields to show, in the section's order."""
    names = list(section.model_fields) if only is None else list(only)
    return {name: section.model_fields[name] for name in names if name not in set(leave)}


def inputs_of(
    section: type[Section],
    only: Iterable[str] | None = None,
    leave: Iterable[str] = (),
    *,
    prefix: str = "",
    basic: Iterable[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> list[io.Input]:
    """One input a field, with its default, bounds and description.

    basic: names that are always shown; the others fold under "advanced" (None: all are shown).
    defaults: other defaults than the section's, where a node starts from better ones.
    """
    shown = None if basic is None else set(basic)
    made = []
    for name, info in fields_of(section, only, leave).items():
        default = (defaults or {}).get(name, info.get_default(call_default_factory=True))
        default = None if default is PydanticUndefined else default  # a field that must be given
        made.append(input_of(prefix + name, info, default, advanced=bool(shown is not None and name not in shown)))
    return made


def input_of(name: str, info: FieldInfo, default: Any, *, advanced: bool = False) -> io.Input:
    """The widget of one field."""
    kind, tip = Kind(info), info.description or f"{name.replace('_', ' ').capitalize()}."
    # optional: a workflow of an older version, without a field that came later, still runs
    common: dict[str, Any] = {"tooltip": tip, "advanced": advanced or None, "optional": True}
    if kind.choices:
        options = [str(choice) for choice in kind.choices]
        options = ([NOT_SET] if kind.optional else []) + options
        if kind.type in (int, float):
            return io.String.Input(name, default=_text(default), **common | {"tooltip": f"{tip} One of {', '.join(options)}, or a "
                f"number.".strip()})
        return io.Combo.Input(name, options=options, default=NOT_SET if default is None else str(default), **common)
    if kind.type is bool:
        if kind.optional:
            shown = NOT_SET if default is None else "on" if default else "off"
            return io.Combo.Input(name, options=[NOT_SET, "on", "off"], default=shown, **common)
        return io.Boolean.Input(name, default=bool(default), **common)
    if kind.is_number:
        return _number(name, kind, default, common)
    multiline = kind.origin in (list, dict) or kind.type in (list, dict)
    return io.String.Input(name, default=_text(default), multiline=multiline, **common | {"tooltip": f"{tip}{_form(kind)}"})


def _number(name: str, kind: Kind, default: Any, common: dict[str, Any]) -> io.Input:
    low = kind.unset if kind.optional else kind.low
    if kind.optional:
        common = common | {"tooltip": f"{common['tooltip']} {kind.unset} = not set."}
    value = kind.unset if default is None else default
    if kind.type is int:
        low = low + 1 if kind.open_low and not kind.optional else low
        high = min(kind.high - kind.open_high, MAX_SEED if name == "seed" else BIG)
        # without this the browser draws a new seed after every run
        fixed = {"control_after_generate": io.ControlAfterGenerate.fixed} if name.endswith("seed") else {}
        return io.Int.Input(name, default=int(value), min=int(low), max=int(high), **fixed, **common)
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 1) if value else 0.01
    step = min(step, 0.01 if abs(value) < 10 else 1.0)
    return io.Float.Input(name, default=float(value), min=float(low), max=float(kind.high), step=step, round=False, **common)


def _form(kind: Kind) -> str:
    """How a text widget is to be written."""
    if kind.origin is tuple:
        return " Numbers with commas between."
    if kind.origin is list or kind.type is list:
        return " One a line, or with semicolons between."
    if kind.origin is dict or kind.type is dict:
        return " One a line, as name = value."
    return ""


def _text(value: Any) -> str:
    """A field's value as a text widget shows it."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return "\n".join(f"{k} = {v}" for k, v in value.items())
    if isinstance(value, tuple):
        return ", ".join(str(v) for v in value)
    if isinstance(value, list):
        return "\n".join(str(v) for v in value)
    return str(value)


# -- and back -------------------------------------------------------------------------------------------------------


def values_of(section: type[Section], widgets: Mapping[str, Any], *, prefix: str = "", only: Iterable[str] | None = None) -> dict[str, Any]:
    """Fields of ``section`` from widget values; a field whose widget is absent (an old workflow, or a choice's field: then None) keeps its default."""
    found = {}
    for name, info in fields_of(section, only).items():
        if widgets.get(prefix + name) is not None:
            found[name] = value_of(prefix + name, info, widgets[prefix + name])
    return found


def value_of(name: str, info: FieldInfo, value: Any) -> Any:
    """One field's value from its widget. Raises ConfigError when a text widget cannot be read."""
    kind = Kind(info)
    if value is None:
        return None
    if kind.choices:
        if value in (NOT_SET, ""):
            return None
        return _plain(str(value), kind) if kind.type in (int, float) else _choice(str(value), kind)
    if kind.type is bool:
        return {NOT_SET: None, "on": True, "off": False}.get(value, bool(value)) if kind.optional else bool(value)
    if kind.is_number:
        return None if kind.optional and value == kind.unset else kind.type(value)
    text = str(value).strip()
    if kind.origin is tuple:
        return _numbers(name, text) if text else None if kind.optional else []
    if kind.origin is list or kind.type is list:
        return lines_of(text)
    if kind.origin is dict or kind.type is dict:
        return pairs_of(name, text)
    return None if kind.optional and not text else str(value)


def _choice(text: str, kind: Kind) -> Any:
    return next((choice for choice in kind.choices if str(choice) == text), text)


def _plain(text: str, kind: Kind) -> Any:
    """A choice, or the number that a field takes instead of one."""
    if text in [str(choice) for choice in kind.choices]:
        return _choice(text, kind)
    try:
        return kind.type(float(text)) if kind.type is int else kind.type(text)
    except ValueError:
        return text  # the section's own check names what is allowed


def _numbers(name: str, text: str) -> list[float | None]:
    try:
        return [None if part.strip() in ("None", "") else float(part) for part in text.strip("()[] ").split(",")]
    except ValueError as error:
        raise ConfigError("widget.numbers", f"{name}: {text!r:.60} is no list of "
            f"numbers.", "Write numbers with commas between, such as 0.9, 0.999.") from error


def lines_of(text: str) -> list[str]:
    """The entries of a list widget: lines, or parts between semicolons; empty ones left out."""
    return [part.strip() for line in text.splitlines() for part in line.split(";") if part.strip()]


def pairs_of(name: str, text: str) -> dict[str, Any]:
    """The entries of a mapping widget: ``name = value`` a line; numbers become numbers."""
    found: dict[str, Any] = {}
    for line in lines_of(text):
        key, sign, value = line.partition("=")
        if not sign or not key.strip():
            raise ConfigError("widget.pairs", f"{name}: {line!r:.60} has no 'name = value' "
                f"form.", "Write one entry a line, such as audio = 16.")
        found[key.strip()] = _guess(value.strip())
    return found


def _guess(text: str) -> Any:
    for reader in (int, float):
        try:
            return reader(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


# -- choices that bring fields of their own --------------------------------------------------------------------------


def choice_input(
    name: str, table: Mapping[str, type[Section]], *, default: str, tooltip: str, leave: Iterable[str] = ()
) -> io.DynamicCombo.Input:
    """A dropdown whose options each bring the fields of their class; the default stands first, as the widget has none."""
    order = [default, *(key for key in table if key != default)]
    options = [io.DynamicCombo.Option(key, inputs_of(table[key], leave=leave)) for key in order]
    return io.DynamicCombo.Input(name, options=options, tooltip=tooltip, optional=True)


def choice_of(name: str, table: Mapping[str, type[Section]], value: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(chosen key, its class's fields) from what ComfyUI passes for :func:`choice_input`; fields at their default are left out."""
    key = value[name]
    kind = table[key]
    given = values_of(kind, value)
    plain = {n: i.get_default(call_default_factory=True) for n, i in kind.model_fields.items()}
    return key, {n: v for n, v in given.items() if _differs(v, plain[n])}


def _differs(value: Any, default: Any) -> bool:
    return (list(value) if isinstance(value, list | tuple) else value) != (list(default) if isinstance(default, list | tuple) else default)
