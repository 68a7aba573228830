"""What a LoRA file says about itself in its safetensors metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .. import __version__ as _version

_SPATIAL_KEYS = ("reference_downscale_factor", "reference_spatial_scale_factor")
_TEMPORAL_KEY = "reference_temporal_scale_factor"
_PREFIX = "ltx_train."


@dataclass(frozen=True)
class LoraMetadata:
    """The origin of a LoRA. rank and alpha are the user's; the file's own ``.alpha`` tensors equal each module's rank.

    base: fingerprint of the transformer. reference_spatial, reference_temporal: how many times smaller or sparser the
    reference was than the target (IC-LoRA); None where the mode has no reference.
    """

    family: str = ""
    model_version: str = ""
    kind: str = "lora"
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = ()
    mode: str = ""
    trigger: str = ""
    steps: int | None = None
    base: str = ""
    dataset: str = ""
    config: str = ""
    reference_spatial: float | None = None
    reference_temporal: float | None = None
    version: str = _version
    extra: Mapping[str, str] = field(default_factory=dict)

    def to_strings(self) -> dict[str, str]:
        """The safetensors metadata. Scale factors stand under every key that readers look for."""
        own = {
            "family": self.family, "kind": self.kind, "rank": self.rank, "alpha": self.alpha, "targets": list(self.targets), "mode": self.mode,
            "trigger": self.trigger, "steps": self.steps, "base": self.base, "dataset": self.dataset, "config": self.config, "version": self.version,
        }  # fmt: skip
        out = {"format": "pt", **self.extra}
        out.update({_PREFIX + key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items() if value not in ("", None, [])})
        if self.model_version:
            out["model_version"] = self.model_version
        if self.rank is not None:
            out["lora_rank"] = str(self.rank)
        if self.trigger:
            out["modelspec.trigger_phrase"] = self.trigger
        if self.family:
            out["modelspec.architecture"] = f"{self.family}/{self.kind}"
        if self.reference_spatial is not None:
            out.update(dict.fromkeys(_SPATIAL_KEYS, _number(self.reference_spatial)))
        if self.reference_temporal is not None:
            out[_TEMPORAL_KEY] = _number(self.reference_temporal)
        return out

    @classmethod
    def of(cls, strings: Mapping[str, str]) -> LoraMetadata:
        """What a file's metadata says, ours or others'; unknown keys stay in ``extra``."""
        own = {key.removeprefix(_PREFIX): value for key, value in strings.items() if key.startswith(_PREFIX)}
        derived = {"format", "model_version", "lora_rank", "modelspec.trigger_phrase", "modelspec.architecture", _TEMPORAL_KEY, *_SPATIAL_KEYS}
        spatial = next((v for k, v in strings.items() if k in _SPATIAL_KEYS or k.endswith(_SPATIAL_KEYS[0])), None)
        return cls(
            family=own.get("family", ""),
            model_version=strings.get("model_version", ""),
            kind=own.get("kind", "lora"),
            rank=_integer(own.get("rank") or strings.get("lora_rank")),
            alpha=_real(own.get("alpha")),
            targets=_names(own.get("targets")),
            mode=own.get("mode", ""),
            trigger=own.get("trigger") or strings.get("modelspec.trigger_phrase", ""),
            steps=_integer(own.get("steps")),
            base=own.get("base", ""),
            dataset=own.get("dataset", ""),
            config=own.get("config", ""),
            reference_spatial=_real(spatial),
            reference_temporal=_real(strings.get(_TEMPORAL_KEY)),
            version=own.get("version", ""),
            extra={k: v for k, v in strings.items() if not k.startswith(_PREFIX) and k not in derived},
        )


def _number(value: float) -> str:
    """2 for 2.0: readers parse whole numbers."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _names(text: str | None) -> tuple[str, ...]:
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return ()  # another tool's free text
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _integer(text: str | None) -> int | None:
    value = _real(text)
    return None if value is None else int(value)


def _real(text: str | None) -> float | None:
    try:
        value = None if text is None else float(text)
    except ValueError:
        return None  # another tool's free text
    return value if value is not None and math.isfinite(value) else None
