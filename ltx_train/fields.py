"""The reference page of every field of a training config, generated from the sections themselves."""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .config import TrainConfig

HEAD = """# Fields of a training config

Every section and field of the YAML that `python -m ltx_train train` reads, with its default. The names of the official
`LtxTrainerConfig` mean what they mean there. Unknown fields are refused with the nearest known name.
This page is made by `python -m ltx_train fields`.
"""


def page(job: type[BaseModel] = TrainConfig) -> str:
    """The whole page as Markdown: the job's own fields, then a table a section, then those that sections hold."""
    done: dict[type[BaseModel], None] = {}
    waiting: list[type[BaseModel]] = [job]
    parts = [HEAD]
    while waiting:
        model = waiting.pop(0)
        if model in done:
            continue
        done[model] = None
        parts.append(_table(model))
        waiting += [m for info in model.model_fields.values() for m in _models(info.annotation) if m not in done]
    return "\n".join(parts)


def _table(model: type[BaseModel]) -> str:
    about = (model.__doc__ or "").strip().splitlines()[0] if model.__doc__ else ""
    if list(model.model_fields) == ["root"]:
        kinds = ", ".join(f"[{m.__name__}](#{m.__name__.lower()})" for m in _models(model.model_fields["root"].annotation))
        return f"## {model.__name__}\n\n{about} One of: {kinds}.\n"
    rows = [f"| `{name}` | {_kind(info)} | {_default(info)} | {_cell(info.description or _about(info))} |" for name, info in model.model_fields.items()]
    return "\n".join([f"## {model.__name__}", "", about, "", "| field | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _about(info: FieldInfo) -> str:
    """The first line of the section that a field holds, where the field says nothing of itself."""
    found = _models(info.annotation)
    return (found[0].__doc__ or "").strip().splitlines()[0] if found and found[0].__doc__ else ""


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The section classes within an annotation, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _kind(info: FieldInfo) -> str:
    bounds = [f"{sign} {getattr(m, name)}" for m in info.metadata for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")) if getattr(m, name, None) is not None]
    allowed = (info.json_schema_extra or {}).get("enum") if isinstance(info.json_schema_extra, dict) else None
    text = " or ".join(f"`{json.dumps(v)}`" for v in allowed) if allowed else _name(info.annotation)
    return _cell(text + (f" ({', '.join(bounds)})" if bounds else ""))


def _name(annotation: Any) -> str:
    """A type in plain words; sections as links."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "none"
    if origin is Annotated:
        return _name(args[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(a)}`" for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_name(a) for a in args))
    if origin in (list, tuple):
        return "list of " + _name(args[0]) if len(args) < 2 or args[-1] is Ellipsis or origin is list else f"{len(args)} x {_name(args[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(getattr(annotation, "__name__", ""), str(annotation))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True) if info.default_factory is None or not info.default_factory_takes_validated_data else PydanticUndefined
    if isinstance(value, BaseModel):
        return "its own"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return _cell(f"`{text}`" if len(text) < 60 else f"`{text[:56]}...`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
