"""The README.md of a trained LoRA for the Hugging Face Hub."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ModelCard:
    """What the card tells. ``samples``: (file, its prompt); ``base_model``: a Hub name such as Lightricks/LTX-2."""

    title: str
    base_model: str
    trigger: str = ""
    rank: int | None = None
    alpha: float | None = None
    steps: int | None = None
    mode: str = ""
    license: str = "other"
    samples: tuple[tuple[Path, str], ...] = field(default_factory=tuple)

    def text(self, repository: str, file_name: str) -> str:
        """Markdown with the Hub's front matter; every value quoted so that no prompt can break the YAML."""
        quote = lambda value: json.dumps(str(value), ensure_ascii=False)  # noqa: E731
        head = ["---", f"base_model: {quote(self.base_model)}", f"license: {quote(self.license)}", "pipeline_tag: text-to-video"]
        head += ["tags:", *(f"- {tag}" for tag in ("lora", "ltx-video", "text-to-video", "comfyui"))]
        if self.trigger:
            head.append(f"instance_prompt: {quote(self.trigger)}")
        if self.samples:
            head.append("widget:")
            for path, prompt in self.samples:
                head += [f"- text: {quote(prompt or path.stem)}", "  output:", f"    url: {quote(f'samples/{path.name}')}"]
        rows = {"Base model": self.base_model, "Mode": self.mode, "Rank": self.rank, "Alpha": self.alpha, "Steps": self.steps, "Trigger": self.trigger}
        table = [f"| {name} | {value} |" for name, value in rows.items() if value not in (None, "")]
        body = [
            "---",
            "",
            f"# {self.title}",
            "",
            f"A LoRA for {self.base_model}, trained with LTX Train.",
            "",
            "| | |",
            "|---|---|",
            *table,
            "",
            "<Gallery />" if self.samples else "",
            "",
            "## Use",
            "",
            f"ComfyUI: put `{file_name}` from `{repository}` into `models/loras` and load it with LoraLoaderModelOnly at strength 1.",
            "The scale alpha/rank is folded into the file.",
            "",
        ]
        return "\n".join(head + body)
