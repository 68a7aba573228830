"""A stand-in for the parts of ComfyUI that our nodes reach, so that they load and run in tests without it."""

import enum
import sys
import types
from pathlib import Path

import torch

WIDGETS = {"Int": "INT", "Float": "FLOAT", "Boolean": "BOOLEAN", "String": "STRING", "Combo": "COMBO"}
SOCKETS = {"Image": "IMAGE", "Audio": "AUDIO", "Video": "VIDEO", "Vae": "VAE", "Clip": "CLIP", "LoraModel": "LORA_MODEL", "LossMap": "LOSS_MAP"}


class Interrupted(BaseException):
    """ComfyUI's InterruptProcessingException derives from BaseException too."""


class Input:
    def __init__(self, io_type, id, **more):
        self.io_type, self.id = io_type, id
        self.__dict__.update({"optional": False, "tooltip": None, "advanced": None, "default": None, "options": None}, **more)


class Output:
    def __init__(self, io_type, id=None, display_name=None, tooltip=None):
        self.io_type, self.id, self.display_name, self.tooltip = io_type, id, display_name, tooltip


def custom(io_type):
    def make_input(id, *args, **more):
        return Input(io_type, id, **more)

    return types.SimpleNamespace(Input=make_input, Output=lambda id=None, **more: Output(io_type, id, **more), io_type=io_type)


class Option:
    def __init__(self, key, inputs):
        self.key, self.inputs = key, inputs


class Schema:
    def __init__(self, **fields):
        self.__dict__.update({"is_output_node": False, "hidden": [], "description": "", "search_aliases": []}, **fields)


class NodeOutput:
    def __init__(self, *args, ui=None, **more):
        self.args, self.ui = args, ui


class ComfyNode:
    hidden = types.SimpleNamespace(unique_id="7", prompt={"1": {}}, extra_pnginfo={})


class ComfyExtension:
    async def on_load(self):
        pass


def io_module():
    io = types.SimpleNamespace(Custom=custom, Schema=Schema, NodeOutput=NodeOutput, ComfyNode=ComfyNode, Input=Input)
    for name, io_type in {**WIDGETS, **SOCKETS}.items():
        setattr(io, name, custom(io_type))
    io.MultiType = types.SimpleNamespace(Input=lambda id, types, **more: Input(",".join(t.io_type for t in types), id, **more))
    io.DynamicCombo = types.SimpleNamespace(Input=lambda id, options, **more: Input("COMFY_DYNAMICCOMBO_V3", id, options=options, **more), Option=Option)
    io.Hidden = enum.Enum("Hidden", ["unique_id", "prompt", "extra_pnginfo"])
    io.ControlAfterGenerate = enum.Enum("ControlAfterGenerate", ["fixed", "randomize"])
    return io


class Host:
    """ComfyUI's folders below one directory, and what the nodes sent to the browser."""

    def __init__(self, base: Path):
        self.base = base
        self.sent, self.texts, self.progress, self.interrupt = [], [], [], False
        self.listen = "127.0.0.1"
        for name in ("input", "output", "datasets", "user/__ltx_train", "models/checkpoints", "models/vae", "models/text_encoders", "models/diffusion_models", "models/loras"):
            (base / name).mkdir(parents=True, exist_ok=True)

    def folders(self, kind):
        if kind == "datasets":
            return [str(self.base / "datasets")]
        return [str(self.base / "models" / kind), *([str(self.base / "output" / "loras")] if kind == "loras" else [])]

    def files(self, kind):
        return sorted(p.relative_to(f).as_posix() for f in map(Path, self.folders(kind)) for p in f.rglob("*") if p.is_file())

    def full_path(self, kind, name):
        return next((str(Path(f) / name) for f in self.folders(kind) if (Path(f) / name).is_file()), None)

    def take(self):
        if self.interrupt:
            self.interrupt = False
            raise Interrupted

    def modules(self):
        """Module name -> module, for sys.modules."""

        def module(name, **content):
            made = types.ModuleType(name)
            made.__dict__.update(content)
            return made

        def within(directory, target):
            import os

            try:
                directory, target = os.path.realpath(directory), os.path.realpath(target)
                return os.path.commonpath((directory, target)) == directory
            except ValueError:
                return False

        folder_paths = module(
            "folder_paths",
            get_input_directory=lambda: str(self.base / "input"),
            get_output_directory=lambda: str(self.base / "output"),
            get_system_user_directory=lambda name: str(self.base / "user" / f"__{name}"),
            get_folder_paths=self.folders,
            get_filename_list=self.files,
            get_full_path=self.full_path,
            is_within_directory=within,
        )
        prompt_server = types.SimpleNamespace(
            send_progress_text=lambda text, node: self.texts.append((node, text)), send_sync=lambda event, data, sid=None: self.sent.append((event, data)), routes=None
        )
        execution = types.SimpleNamespace(set_progress=lambda **fields: self.progress.append(fields))
        management = module(
            "comfy.model_management",
            InterruptProcessingException=Interrupted,
            throw_exception_if_processing_interrupted=self.take,
            unload_all_models=lambda: None,
            soft_empty_cache=lambda: None,
        )
        management.__file__ = str(self.base / "comfy" / "model_management.py")
        comfy = module("comfy", __path__=[], model_management=management)
        latest = module(
            "comfy_api.latest", io=io_module(), ComfyExtension=ComfyExtension, InputImpl=types.SimpleNamespace(), ComfyAPISync=lambda: types.SimpleNamespace(execution=execution)
        )
        return {
            "folder_paths": folder_paths,
            "server": module("server", PromptServer=types.SimpleNamespace(instance=prompt_server)),
            "comfy": comfy,
            "comfy.model_management": management,
            "comfy.cli_args": module("comfy.cli_args", args=types.SimpleNamespace(listen=self.listen)),
            "comfy_api": module("comfy_api", __path__=[], latest=latest),
            "comfy_api.latest": latest,
            "comfy_execution": module("comfy_execution", __path__=[]),
            "comfy_execution.graph": module("comfy_execution.graph", ExecutionBlocker=type("ExecutionBlocker", (), {"__init__": lambda self, message: None})),
        }


def load_pack(root: Path, name: str = "/custom_nodes/LTX Trainer ü"):
    """The pack's root module, loaded by its path as ComfyUI does it."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def described(node) -> dict:
    """A node's schema in plain terms, as /object_info tells it."""
    schema = node.define_schema()
    return {
        "title": schema.display_name,
        "category": schema.category,
        "output_node": schema.is_output_node,
        "inputs": {one.id: _plain(one) for one in schema.inputs},
        "outputs": {out.display_name: str(out.io_type) for out in schema.outputs},
    }


def _plain(one) -> dict:
    made = {"type": str(one.io_type), "optional": bool(one.optional)}
    for name in ("default", "min", "max", "multiline"):
        value = getattr(one, name, None)
        if value is not None:
            made[name] = value
    if one.options is not None:
        made["options"] = {o.key: {i.id: _plain(i) for i in o.inputs} for o in one.options} if one.io_type.startswith("COMFY_DYNAMIC") else list(one.options)
    return made


def tensor(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))
