"""The house rules: who may import whom, what stays out of the light parts, first-line docstrings. Each failure names its line."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "ltx_train"

# floors from the ground up; rooms of one floor do not know each other, neighbours inside a room lean one way
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "section"),
    ("geometry", "text", "tensorfile", "transfer"),
    ("models", "data", "runs"),
    ("conditioning", "lora", "memory"),
    ("training", "sampling"),
    ("config",),
    ("preprocess", "encode", "planner", "autotune", "launch", "spawn", "environment", "contexts", "validation", "parts", "training_data", "trained_weights", "run_setup", "decode", "network", "sample_media", "sample_job", "room", "contact_sheet", "held_out", "fields", "checks", "parking", "saves", "step_report"),
    ("trainer",),
    ("worker", "bootstrap", "captioner", "controls", "tools", "doctor", "doctor_probes", "doctor_report", "doctor_job", "tiny", "bench"),
    ("__main__", "cli", "demo", "demo_chart"),
)
# the corridor's files of one floor may lean on each other, as neighbours in a room do
CORRIDOR = len(FLOORS) - 4
HOST = {"comfy", "comfy_api", "comfy_extras", "comfy_execution", "folder_paths", "server", "nodes", "execution", "app"}
HEAVY = {"accelerate", "peft", "diffusers", "transformers", "optimum", "bitsandbytes", "wandb", "huggingface_hub", "tensorboard", "prodigyopt", "schedulefree", "scenedetect", "rich"}
# what the nodes reach; these and all that they import at module level load with ComfyUI's own packages
LIGHT = ("config", "launch", "planner", "preprocess", "runs", "errors", "data.sources", "data.report", "models.checkpoint", "lora.files", "lora.edit", "environment", "tools")
NODES_MAY = {"config", "run_setup", "text", "geometry", "launch", "planner", "preprocess", "encode", "runs", "errors", "section", "data.sources", "data.report", "models.checkpoint", "models.codec", "lora.files", "lora.edit", "environment"}
# and the tables that widgets are derived from, the ground's types, and how a run is opened
NODES_MAY |= {"tools", "data.listing", "run_setup", "geometry", "text", "conditioning.modes", "sampling.recipe", "training.optim", "training.schedule", "training.flow_matching"}


@dataclass(frozen=True)
class Import:
    """One import: where it stands, what it brings (absolute dotted name), and whether it runs when the file loads."""

    file: Path
    line: int
    name: str
    at_load: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT).as_posix()}:{self.line} imports {self.name}"


def python_files(folder):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def module_of(file):
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _resolve(node, package):
    """The absolute names that an import statement brings; `from . import x` brings x itself."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
    named = [f"{base}.{alias.name}" for alias in node.names]
    return [name if (ROOT / (name.replace(".", "/") + ".py")).exists() or (ROOT / name.replace(".", "/")).is_dir() else base for name in named]


@cache
def tree_of(file):
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def imports_of(file):
    tree = tree_of(file)
    module = module_of(file).split(".")
    package = module if file.name == "__init__.py" else module[:-1]
    found = []

    def visit(node, at_load):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                found.extend(Import(file, child.lineno, name, at_load) for name in dict.fromkeys(_resolve(child, package)))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            else:
                visit(child, at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(tree, True)
    return found


@cache
def engine_imports():
    """Every import of the engine; parsed when first asked for, not by each process that collects the tests."""
    return [item for file in python_files(ENGINE) for item in imports_of(file)]


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor_of(room):
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def test_every_room_has_its_floor():
    rooms = {room_of(module_of(file)) for file in python_files(ENGINE)} - {""}
    assert {room for room in rooms if floor_of(room) is None} == set(), "give the new room or file a floor in FLOORS"
    assert len(engine_imports()) > 50


def test_files_import_from_lower_floors_only():
    wrong = []
    for item in engine_imports():
        if not item.name.startswith("ltx_train."):
            continue
        room, other = room_of(module_of(item.file)), room_of(item.name)
        here, there = floor_of(room), floor_of(other)
        if room == other or here is None:  # the package itself has no floor; an unknown room fails above
            continue
        same_floor_ok = here == there and (here < 2 or CORRIDOR <= here)
        if there is None or there > here or (there == here and not same_floor_ok):
            wrong.append(f"{item} (floor {there} from floor {here})")
    assert wrong == []


def test_no_file_leans_on_one_that_leans_on_it():
    files = {module_of(file) for file in python_files(ENGINE)}
    edges = {}
    for item in engine_imports():
        name = item.name
        while name not in files and "." in name:
            name = name.rpartition(".")[0]
        if name.startswith("ltx_train.") and name != module_of(item.file):
            edges.setdefault(module_of(item.file), {}).setdefault(name, item)

    def cycle(start):
        path, seen = [start], set()

        def walk(module):
            for other in edges.get(module, {}):
                if other == start:
                    return [*path, other]
                if other not in seen:
                    seen.add(other)
                    path.append(other)
                    found = walk(other)
                    if found:
                        return found
                    path.pop()
            return None

        return walk(start)

    loops = [loop for loop in map(cycle, sorted(edges)) if loop]
    assert loops == [], "\n".join("; ".join(str(edges[a][b]) for a, b in zip(loop, loop[1:])) for loop in loops)


def test_the_engine_does_not_know_comfyui():
    assert [str(item) for item in engine_imports() if item.name.split(".")[0] in HOST] == []


def test_the_engine_imports_itself_relatively():
    wrong = []
    for file in python_files(ENGINE):
        for node in ast.walk(tree_of(file)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            wrong += [f"{file.relative_to(ROOT).as_posix()}:{node.lineno} imports {name} absolutely" for name in names if name.split(".")[0] == "ltx_train"]
    assert wrong == []


def loaded_by(roots):
    """module -> the import that brings it, for everything that loads when the modules in ``roots`` do."""
    by_module = {}
    for file in python_files(ENGINE):
        by_module[module_of(file)] = [item for item in imports_of(file) if item.at_load]
    wanted = [module for module in by_module if any(module == f"ltx_train.{root}" or module.startswith(f"ltx_train.{root}.") for root in roots)]
    reached, waiting = {module: None for module in wanted}, list(wanted)
    outside = []
    while waiting:
        module = waiting.pop()
        for item in by_module[module]:
            name = item.name
            if not name.startswith("ltx_train"):
                outside.append(item)
                continue
            while name not in by_module and "." in name:
                name = name.rpartition(".")[0]
            for known in (name, name.rpartition(".")[0]):  # a package's __init__ loads with its file
                if known in by_module and known not in reached:
                    reached[known] = item
                    waiting.append(known)
    return reached, outside


def test_the_light_parts_load_no_heavy_package():
    reached, outside = loaded_by(LIGHT)
    assert "ltx_train.runs.run_dir" in reached
    assert [str(item) for item in outside if item.name.split(".")[0] in HEAVY] == []


def test_training_on_cached_data_loads_neither_av_nor_diffusers():
    reached, outside = loaded_by(("trainer", "worker", "training", "lora", "conditioning", "data.dataset", "data.cache"))
    assert [str(item) for item in outside if item.name.split(".")[0] in {"av", "diffusers"}] == []


BLOCKED = """
import importlib, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {root!r})
loaded = []
for name in {modules!r}:
    importlib.import_module(name)
    loaded.append(name)
print(len(loaded))
"""


def test_the_light_parts_import_with_the_heavy_packages_blocked():
    blocked = sorted(HEAVY)
    modules = [module_of(file) for file in python_files(ENGINE)]
    light = [m for m in modules if any(m == f"ltx_train.{root}" or m.startswith(f"ltx_train.{root}.") for root in LIGHT)]
    code = BLOCKED.format(blocked=set(blocked), root=str(ROOT), modules=light)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(light) >= 8


def test_nodes_reach_only_what_they_may():
    wrong = []
    for file in python_files(ROOT / "nodes") if (ROOT / "nodes").is_dir() else []:
        for item in imports_of(file):
            if item.name.startswith("ltx_train") and not any(item.name.removeprefix("ltx_train.") == ok or item.name.startswith(f"ltx_train.{ok}.") for ok in NODES_MAY):
                wrong.append(str(item))
            if item.name.split(".")[0] in HEAVY:
                wrong.append(str(item))
    assert wrong == []


def test_the_first_line_of_every_file_says_what_lives_there():
    files = [*python_files(ENGINE), *python_files(ROOT / "tests"), *(python_files(ROOT / "nodes") if (ROOT / "nodes").is_dir() else [])]
    wrong = []
    for file in files:
        first = file.read_text(encoding="utf-8").split("\n", 1)[0]
        if not first.startswith('"""') or len(first) < 12:
            wrong.append(f"{file.relative_to(ROOT).as_posix()}:1 {first[:60]!r}")
    assert wrong == []


def test_tests_are_no_package():
    """An __init__.py beside tests would make pytest import the pack's own __init__.py; test_pack is a pack for the host, without tests."""
    host_pack = ROOT / "tests" / "comfyui" / "test_pack"
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py") if path.parent != host_pack] == []


def test_nothing_is_left_unfinished():
    wrong = []
    for file in python_files(ENGINE):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if any(word in line for word in ("NotImplementedError", "TODO", "FIXME", "XXX")):
                wrong.append(f"{file.relative_to(ROOT).as_posix()}:{number} {line.strip()[:80]}")
    assert wrong == []


def test_imports_are_found_wherever_they_stand(tmp_path, monkeypatch):
    """The reader of imports itself: relative and lazy ones, and none for type checking alone."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    folder = tmp_path / "ltx_train" / "data"
    folder.mkdir(parents=True)
    (folder / "cache.py").touch()
    file = folder / "sources.py"
    file.write_text(
        "from __future__ import annotations\nimport os.path\nfrom ..errors import DataError\nfrom . import cache\nfrom .cache import Cache\n"
        "try:\n    import peft\nexcept ImportError:\n    peft = None\nclass A:\n    import rich\n    def f(self):\n        import wandb\n"
        "if TYPE_CHECKING:\n    import diffusers\n"
    )
    assert [(item.line, item.name, item.at_load) for item in imports_of(file)][1:] == [
        (2, "os.path", True),
        (3, "ltx_train.errors", True),
        (4, "ltx_train.data.cache", True),
        (5, "ltx_train.data.cache", True),
        (7, "peft", True),
        (11, "rich", True),
        (13, "wandb", False),
    ]
    assert str(imports_of(file)[-1]) == "ltx_train/data/sources.py:13 imports wandb"
