"""Adapters on the transformer: settings, attaching, the set of trainable weights."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from ..errors import ConfigError, LtxTrainError, MissingPackage
from ..models.linear import Linear, LoraWeights
from ..section import Section
from .module import LoraModule
from .targets import matches, select, without_effect

Kind = Literal["lora", "rslora", "dora", "loha", "lokr"]


class LoraSection(Section):
    """The official ``lora`` section and ours: other kinds, rank and alpha by module, exclusions."""

    rank: int = Field(64, ge=2, description="Rank of the update: its capacity and file size.")
    alpha: float = Field(64, gt=0, description="The update is scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: list[str] = Field(
        default=["to_k", "to_q", "to_v", "to_out.0"], min_length=1,
        description="Names or ends of names of modules, groups (video, audio, cross_modal, ff, text, ...), or re:<regular expression>.",
    )  # fmt: skip
    kind: Kind = Field("lora", description="lora; rslora (scale alpha / sqrt(rank)); dora, loha, lokr through peft.")
    exclude_modules: list[str] = Field(default_factory=list, description="Modules left out though a target matches, by the same patterns.")
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict, description="Rank by module pattern; the first match counts.")
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict, description="Alpha by module pattern; the first match counts.")
    init: Literal["default", "gaussian"] = Field("default", description="Start of A: uniform as in the LoRA paper's code, or normal with deviation 1 / rank.")
    lokr_factor: int = Field(-1, ge=-1, description="lokr: size of the smaller factor; -1 is near the square root.")

    @field_validator("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")
    @classmethod
    def _patterns(cls, patterns: Any) -> Any:
        for pattern in patterns:
            if not pattern:
                raise ValueError("a pattern is empty: name a module, a group, or re:<regular expression>")
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ValueError(f"{pattern} is no regular expression: {error}") from error
        return patterns

    def package(self) -> Any:
        """peft, for the kinds that it computes; None for ours. Raises MissingPackage when it is not installed."""
        if self.kind in ("lora", "rslora"):
            return None
        try:
            return importlib.import_module("peft")
        except ImportError as error:
            raise MissingPackage("peft", f"The adapter kind {self.kind}", "Or choose kind: lora") from error

    @property
    def patterns(self) -> dict[str, list[str]]:
        """Every module pattern by the field that it stands in."""
        return {name: list(getattr(self, name)) for name in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")}

    def rank_of(self, name: str) -> int:
        """The rank of one module, by its name."""
        return next((rank for pattern, rank in self.rank_pattern.items() if matches(name, pattern)), self.rank)

    def alpha_of(self, name: str) -> float:
        """The alpha of one module, by its name."""
        return next((alpha for pattern, alpha in self.alpha_pattern.items() if matches(name, pattern)), self.alpha)

    def scale_of(self, name: str) -> float:
        """The factor on B A in training: alpha / rank, for rslora alpha / sqrt(rank)."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (rank**0.5 if self.kind == "rslora" else rank)

    def findings(self) -> list[str]:
        """Settings that work but are seldom meant, in words for the log."""
        scale = self.scale_of("")
        return [f"lora.alpha {self.alpha:g} at rank {self.rank} scales what is learned by {scale:.2g}: it learns slowly. alpha = rank is usual."] if scale < 0.1 else []


def module_seed(seed: int, name: str) -> int:
    """The seed of one module's start values: the run's seed and the module's name, whatever the order or number of ranks."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """The host's random state set for one module, and put back after it."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(module_seed(seed, name))
        yield


@dataclass(frozen=True)
class AdaptedModule:
    """One adapted module: its name, shape [out, in], rank, scale, and its trainable tensors by their key suffix."""

    name: str
    shape: tuple[int, int]
    rank: int
    scale: float
    tensors: Mapping[str, nn.Parameter]


class AdapterSet:
    """All trainable adapter weights of a transformer under plain names ``<module>.<suffix>``.

    Suffixes: lora_A.weight [rank, in], lora_B.weight [out, rank]; dora also lora_magnitude_vector [out];
    loha hada_w1_a ... hada_w2_b; lokr lokr_w1, lokr_w2 (or their factors _a, _b).
    """

    def __init__(self, section: LoraSection, modules: Iterable[AdaptedModule], switch: Callable[[bool], None], unmatched: list[str]) -> None:
        self.section = section
        self.modules = {module.name: module for module in modules}
        self.unmatched = unmatched
        self._switch = switch

    @property
    def names(self) -> list[str]:
        """Names of the adapted modules, in module order."""
        return list(self.modules)

    @property
    def kind(self) -> str:
        return self.section.kind

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Plain name -> trainable tensor, in an order that depends on the model alone."""
        return {f"{m.name}.{suffix}": p for m in self.modules.values() for suffix, p in m.tensors.items()}

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    @property
    def parameter_count(self) -> int:
        """Trainable numbers in all."""
        return sum(p.numel() for p in self.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """The trained tensors (float32, no copies) under plain names, with the scale not applied."""
        return {name: p.detach() for name, p in self.named_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved tensors, strictly. Raises ConfigError naming the first that is missing, extra or of another shape."""
        own = self.named_parameters()
        odd = sorted(set(own) ^ set(state)) or [n for n, p in own.items() if tuple(p.shape) != tuple(state[n].shape)]
        if odd:
            raise ConfigError(
                "lora.state_mismatch", f"The saved adapter does not fit this one: {odd[0][-70:]}.",
                f"{len(odd)} tensors differ in name or shape. The adapter settings must be those of the run that saved it.",
            )  # fmt: skip
        for name, parameter in own.items():
            parameter.copy_(state[name])

    def enable(self) -> None:
        """Let the adapter take part again."""
        self._switch(True)

    def disable(self) -> None:
        """Leave the base model alone to compute."""
        self._switch(False)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it the base model alone computes (previews, prior preservation)."""
        self.disable()
        try:
            yield
        finally:
            self.enable()


def target_linears(transformer: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer of the network by its name."""
    return {name: module for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}


def attach(transformer: nn.Module, section: LoraSection, *, seed: int, streams: Iterable[str] = ("video", "audio")) -> AdapterSet:
    """Freeze the network and put adapters on the modules that the section names.

    streams: those that are trained; no module of another one is adapted. Start values depend on ``seed`` and the
    module's name only. Raises ConfigError ``lora.no_match`` when nothing matches.
    """
    layers = target_linears(transformer)
    chosen = select(layers, section.target_modules, section.exclude_modules, streams)
    for parameter in transformer.parameters():
        parameter.requires_grad_(False)
    missing = without_effect(layers, chosen, section.patterns)
    build = _attach_lora if section.kind in ("lora", "rslora") else _attach_peft
    modules, switch = build(transformer, {name: layers[name] for name in chosen}, section, seed)
    return AdapterSet(section, modules, switch, missing)


def check_start(section: LoraSection, modules: Mapping[str, LoraModule], file: str) -> None:
    """Raise ConfigError ``lora.kind`` or ``lora.rank`` where an adapter cannot start from these modules of a file.

    modules: those that are adapted here. LoRA and DoRA are fitted to any rank. The factors of LoHa and LoKr cannot be cut
    to a smaller one without loss, and are taken as they are or not at all.
    """
    kind = "lora" if section.kind == "rslora" else section.kind
    for name, module in modules.items():
        if module.kind != kind:
            words = f"{file[-50:]} holds {_WORDS[module.kind]}; lora.kind is {section.kind}."
            hint = f"Set lora.kind: {module.kind}, or " if module.kind in _WORDS and module.kind != "full" else "Merge it into the model, or "
            raise ConfigError("lora.kind", words, f"The first such module is {name}. {hint}leave model.load_checkpoint out.")
        wanted = _factor_shapes(section, name, module.shape)
        if wanted is None or wanted == {part: tuple(value.shape) for part, value in module.tensors.items() if part != "diff_b"}:
            continue
        if module.rank is not None and module.rank != section.rank_of(name):
            raise ConfigError(
                "lora.rank", f"{file[-40:]} is a {_WORDS[kind]} of rank {module.rank}; lora.rank is {section.rank_of(name)}.",
                f"{_WORDS[kind]} is not changed to another rank: set lora.rank: {module.rank}, or leave model.load_checkpoint out. It is so at {name}.",
            )  # fmt: skip
        raise ConfigError(
            "lora.rank", f"{file[-40:]} has other {_WORDS[kind]} factors than lora.rank {section.rank_of(name)} and lora.lokr_factor {section.lokr_factor} make.",
            f"Set lora.rank and lora.lokr_factor as they were when it was trained, or leave model.load_checkpoint out. It is so at {name}.",
        )  # fmt: skip


_WORDS = {"lora": "LoRA", "dora": "DoRA", "loha": "LoHa", "lokr": "LoKr", "full": "plain differences"}


def _factor_shapes(section: LoraSection, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, int]] | None:
    """The shapes of the tensors that peft makes for a LoHa or LoKr of a weight [out, in]; None for the kinds that are fitted."""
    rank, (out, inputs) = section.rank_of(name), shape
    if section.kind == "loha":
        return {f"hada_w{n}_{half}": size for n in (1, 2) for half, size in (("a", (out, rank)), ("b", (rank, inputs)))}
    if section.kind != "lokr":
        return None
    from peft.tuners.lokr.layer import factorization

    (a, b), (c, d) = factorization(out, section.lokr_factor), factorization(inputs, section.lokr_factor)
    second = {"lokr_w2": (b, d)} if rank >= max(b, d) / 2 else {"lokr_w2_a": (b, rank), "lokr_w2_b": (rank, d)}
    return {"lokr_w1": (a, c), **second}


def _attach_lora(transformer: nn.Module, layers: Mapping[str, nn.Linear], section: LoraSection, seed: int) -> tuple[list[AdaptedModule], Callable[[bool], None]]:
    made = []
    for name, layer in layers.items():
        assert isinstance(layer, Linear), f"{name} is a plain nn.Linear: the transformer is built of models.linear.Linear"
        rank = section.rank_of(name)
        with _seeded(seed, name):
            lora = LoraWeights(layer.in_features, layer.out_features, rank, rank * section.scale_of(name), section.dropout)
            if section.init == "gaussian":
                nn.init.normal_(lora.A, std=1 / rank)
        lora.scale = section.scale_of(name)
        layer.lora = lora.to(layer.device).train(layer.training)
        shape = (layer.out_features, layer.in_features)
        made.append(AdaptedModule(name, shape, rank, lora.scale, {"lora_A.weight": lora.A, "lora_B.weight": lora.B}))

    def switch(on: bool) -> None:
        for layer in layers.values():
            layer.lora_enabled = on

    return made, switch


_SUFFIXES = {
    "dora": {"lora_A.default.weight": "lora_A.weight", "lora_B.default.weight": "lora_B.weight", "lora_magnitude_vector.default.weight": "lora_magnitude_vector"},
    "loha": {f"hada_{p}.default": f"hada_{p}" for p in ("w1_a", "w1_b", "w2_a", "w2_b")},
    "lokr": {f"lokr_{p}.default": f"lokr_{p}" for p in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")},
}


def _attach_peft(transformer: nn.Module, layers: Mapping[str, nn.Linear], section: LoraSection, seed: int) -> tuple[list[AdaptedModule], Callable[[bool], None]]:
    """The kinds that peft computes: it wraps each layer; start values are drawn anew a module, so the seed alone decides."""
    peft = section.package()
    for name, layer in layers.items():
        if layer.weight is None:
            raise LtxTrainError(
                "lora.quantized_base", f"The adapter kind {section.kind} needs a base that is not quantised ({name[-50:]} is).",
                "Choose kind: lora or rslora, or set acceleration.quantization to none.",
            )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(_peft_config(section, layers), transformer)
    wrapped = {name: transformer.get_submodule(name) for name in layers}
    made = []
    for name, module in wrapped.items():
        with _seeded(seed, name):
            _reset(module, section)
        known = _SUFFIXES[section.kind]
        tensors = {known[n]: p for n, p in module.named_parameters() if n in known}
        for parameter in tensors.values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        shape = (layers[name].out_features, layers[name].in_features)
        made.append(AdaptedModule(name, shape, section.rank_of(name), section.scale_of(name), dict(sorted(tensors.items()))))

    def switch(on: bool) -> None:
        for module in wrapped.values():
            module.enable_adapters(on)
        for parameter in (p for m in made for p in m.tensors.values()):
            parameter.requires_grad_(True)  # peft freezes what it switches off

    return made, switch


def _reset(module: nn.Module, section: LoraSection) -> None:
    if section.kind == "dora":
        module.reset_lora_parameters("default", "gaussian" if section.init == "gaussian" else True)
    elif section.kind == "lokr":  # zeros in the second factor: the first would leave no gradient to the larger one
        module.reset_adapter_parameters_lycoris_way("default")
    else:
        module.reset_adapter_parameters("default")


def _peft_config(section: LoraSection, layers: Mapping[str, nn.Linear]) -> Any:
    """peft's settings with every module named in full, so that our matching rule decides."""
    import peft

    names = list(layers)
    ranks = {name: section.rank_of(name) for name in names if section.rank_of(name) != section.rank}
    alphas = {name: section.alpha_of(name) for name in names if section.alpha_of(name) != section.alpha}
    common = {"r": section.rank, "target_modules": names, "rank_pattern": ranks, "alpha_pattern": alphas}
    if section.kind == "dora":
        return peft.LoraConfig(lora_alpha=section.alpha, lora_dropout=section.dropout, use_dora=True, **common)
    if section.kind == "loha":
        return peft.LoHaConfig(alpha=section.alpha, module_dropout=section.dropout, **common)
    return peft.LoKrConfig(alpha=section.alpha, module_dropout=section.dropout, decompose_factor=section.lokr_factor, **common)
