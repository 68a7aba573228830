"""The thin roof over the engine: ComfyUI's nodes write jobs and read runs. Nothing heavy is imported here."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import routes, settings, tools
from .dataset import LTXTrainDataset
from .decode import LTXTrainDecode
from .model import LTXTrainLoadModel
from .preprocess import LTXTrainPreprocess
from .runs import LTXTrainLoadRun, LTXTrainSaveLoRA
from .sample import LTXTrainSample
from .train import LTXTrainLoRA

NODES: tuple[type[io.ComfyNode], ...] = (
    LTXTrainLoadModel,
    LTXTrainDataset,
    LTXTrainPreprocess,
    LTXTrainDecode,
    LTXTrainLoRA,
    LTXTrainSample,
    LTXTrainSaveLoRA,
    LTXTrainLoadRun,
    *tools.NODES,
    *settings.NODES,
)


class LTXTrainExtension(ComfyExtension):
    """What ComfyUI asks for our nodes."""

    async def on_load(self) -> None:
        routes.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)
