"""Whether a job is the run already on disk: the same, more of it, with other side settings, or another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Relation = Literal["same", "extend", "continue", "different"]


@dataclass(frozen=True)
class Verdict:
    """How a new job stands to an old one, and the dotted names of the fields that made it so."""

    relation: Relation
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Identity:
    """A job's fields in three classes; values are what YAML and JSON can hold, nested as one likes.

    identity: a change makes another run. extendable: a change (more steps) goes on with the same run.
    free: a change (validation, logging, memory) never matters to the weights.
    """

    identity: Mapping[str, Any]
    extendable: Mapping[str, Any]
    free: Mapping[str, Any]

    def against(self, old: Identity) -> Verdict:
        """The verdict on this job against ``old``: the strongest class that differs decides."""
        rules: tuple[tuple[Relation, Mapping, Mapping], ...] = (
            ("different", self.identity, old.identity),
            ("extend", self.extendable, old.extendable),
            ("continue", self.free, old.free),
        )
        for relation, ours, theirs in rules:
            fields = differing(ours, theirs)
            if fields:
                return Verdict(relation, fields)
        return Verdict("same")


def differing(new: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[str, ...]:
    """Dotted names of the fields whose values differ, sorted; tuples equal lists and paths equal their text."""
    ours, theirs = _flat(new), _flat(old)
    absent = object()
    return tuple(sorted(name for name in ours.keys() | theirs.keys() if ours.get(name, absent) != theirs.get(name, absent)))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.dumps(value, sort_keys=True, default=str)
    return flat
