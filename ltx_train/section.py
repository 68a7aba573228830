"""The base of every settings object: frozen, unknown fields refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One part's settings: a frozen pydantic model in the file of the part that it sets up.

    Widgets, command line options, YAML, checks and help text are derived from its fields, so each field
    has a ``description``, bounds, and a default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=())
