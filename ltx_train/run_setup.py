"""Parent side: from a job to the run directory that carries it, without ever mixing two trainings."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from .config import Job, PreprocessJob, SampleJob, TrainConfig, digest
from .errors import ConfigError, LtxTrainError, RunError
from .launch import Child, attach, start
from .planner import lower_plan
from .runs.identity import Identity, Verdict
from .runs.lock import write_atomic
from .runs.run_dir import RunDir, check_name
from .spawn import Launch

LISTING = "dataset.txt"
"""In a run's directory: the digest of the data that it was started with."""


@dataclass(frozen=True)
class OpenedRun:
    """A run directory with its job written. verdict: None for a new run; ``same`` and finished needs no work."""

    run: RunDir
    job: Job
    verdict: Verdict | None = None

    @property
    def finished(self) -> bool:
        """Whether all that the job asks for is there already."""
        return self.verdict is not None and self.verdict.relation == "same" and self.run.status().state == "finished"


def identity_of_job(config: TrainConfig) -> Identity:
    """The three classes of a training's fields (see :meth:`TrainConfig.identity`)."""
    known = config.model_dump(mode="json")
    identity = config.identity()
    free = {"validation": known["validation"], "checkpoints": known["checkpoints"], "hub": known["hub"], "wandb": known["wandb"], "logging": known["logging"]}
    free |= {"distributed": known["distributed"], "acceleration": {k: v for k, v in known["acceleration"].items() if k != "quantization"}}
    return Identity(identity, config.extendable(), free)


@dataclass(frozen=True)
class FoundRun:
    """The directory that a training will take, before anything is written. old: the job in it; verdict: None for a new run."""

    run: RunDir
    old: TrainConfig | None = None
    verdict: Verdict | None = None


def open_training(config: TrainConfig) -> OpenedRun:
    """The run of a training: the directory it names, gone on with where it is the same training, else ``name_002``.

    A live run of the same training is given back as it is; one that is parked ends first when its settings have changed,
    and goes on with the new ones from its snapshot. Relative paths start at the current folder.
    """
    config = config.resolved()
    found = find_run(config)
    if found.verdict is not None and found.run.live():
        if not parked(found.run) or same_job(config, found):
            return OpenedRun(found.run, found.old, found.verdict)
        end_parked(found.run)
    done = found.run.read_status().step if found.verdict is not None else 0
    if found.verdict is not None and found.verdict.relation == "extend" and config.optimization.steps < done:
        raise RunError(
            "run.steps", f"The run {found.run.name} has {done} steps already; the config asks for {config.optimization.steps}.",
            "Its LoRAs of earlier steps are in its checkpoints folder. Ask for more steps, or use another output_dir.",
        )  # fmt: skip
    run = RunDir.create(found.run.path)
    settled = config.model_copy(update={"output_dir": str(run.path)})
    settled.save(run.job_path("train"))
    listing = dataset_listing(config)
    if listing is not None:
        write_atomic(run.path / LISTING, listing)
    return OpenedRun(run, settled, found.verdict)


def parked(run: RunDir) -> bool:
    """Whether a run's child waits between two parts."""
    return run.read_status().state == "parked" and run.live()


def end_parked(run: RunDir) -> None:
    """End a child that waits between two parts; all is saved, so that a start goes on from there."""
    child = attach(run.path)
    if child is not None:
        child.stop()


def same_job(config: TrainConfig, found: FoundRun) -> bool:
    """Whether a job is the very one that a run's child works by."""
    settled = config.model_copy(update={"output_dir": str(found.run.path)})
    return found.old is not None and settled.model_dump(mode="json") == found.old.model_dump(mode="json")


def dataset_listing(config: TrainConfig) -> str | None:
    """A digest of what the data is now, told without opening a clip: names, captions, sizes, repeats; of a cache, its list.

    None where it cannot be read (the child says why) or is no list of ours. A changed caption or a new clip is another
    training, as a changed path is.
    """
    section = config.data
    try:
        if section.all_sources():
            rows = [[s.id, s.caption, s.repeats, s.weight, _size(s.media), {r: _size(p) for r, p in s.roles.items()}] for s in section.samples()]
            return digest(rows)
        index = section.data_root() / section.index
        return digest(json.loads(index.read_text(encoding="utf-8"))["entries"]) if index.is_file() else None
    except (LtxTrainError, OSError, ValueError, KeyError, TypeError):
        return None


def _size(path: Path | None) -> int | None:
    return path.stat().st_size if path is not None else None


def _other_data(run: RunDir, listing: str | None) -> bool:
    """Whether a run was made with other data than there is now."""
    try:
        known = (run.path / LISTING).read_text(encoding="utf-8")
    except OSError:
        return False
    return listing is not None and known != listing


def find_run(config: TrainConfig) -> FoundRun:
    """Which directory :func:`open_training` takes, and how the job stands to what is there; nothing is written.

    A directory whose run ended before it made anything (a wrong path in its first job) is taken again.
    """
    config = config.resolved()
    wanted = Path(config.output_dir)
    check_name(wanted.name)
    listing = dataset_listing(config)
    for candidate in _versions(wanted):
        run = RunDir(candidate)
        job = run.job_path("train")
        if not job.is_file():
            if _foreign(candidate):
                continue
            break
        empty = not run.live() and _made_nothing(run)
        try:
            old = TrainConfig.load(job)
        except ConfigError:
            if empty:
                break
            continue  # written by another version: never touched
        verdict = identity_of_job(config).against(identity_of_job(old))
        at_work = run.live() and not parked(run)
        if verdict.relation != "different" and (at_work or not _other_data(run, listing)):
            return FoundRun(run, old, verdict)
        if empty:
            break
    return FoundRun(RunDir(candidate))


def _made_nothing(run: RunDir) -> bool:
    """Whether a run ended without a step, a snapshot or a sample: there is nothing that another training could be mixed with."""
    made = [path for folder in (run.checkpoints, run.samples) if folder.is_dir() for path in folder.iterdir()]
    return not made and run.read_status().step == 0


def _versions(wanted: Path):
    """The wanted folder, then wanted_002, wanted_003 ...: those that exist, and the first that does not."""
    yield wanted
    number = 2
    while True:
        yield wanted.with_name(f"{wanted.name}_{number:03d}")
        number += 1


def _foreign(folder: Path) -> bool:
    """A folder with something in it that is no run of ours (an official trainer's output, a user's files)."""
    return folder.is_dir() and any(folder.iterdir())


def open_other(job: PreprocessJob | SampleJob) -> OpenedRun:
    """The directory of a preprocessing or sampling job; the job file is written anew.

    Samples of another job, or anybody's files, are never written over: they make ``name_002``.
    """
    job = job.resolved()
    wanted = Path(job.output_dir)
    check_name(wanted.name)
    place = wanted if isinstance(job, PreprocessJob) else next(p for p in _versions(wanted) if _free_for_samples(p, job))
    run = RunDir.create(place)
    if run.live():
        raise RunError("run.locked", f"The run {run.name} is at work.", "Wait for it, stop it, or use another output_dir.")
    job = job.model_copy(update={"output_dir": str(run.path)})
    job.save(run.job_path(job.kind))
    return OpenedRun(run, job)


def _free_for_samples(place: Path, job: SampleJob) -> bool:
    """Whether a sampling job may write into a folder: a new one, its own of an earlier start, or one where nothing was made."""
    run = RunDir(place)
    path = run.job_path("sample")
    if not path.is_file():
        return not _foreign(place)
    if not run.live() and _made_nothing(run):
        return True
    try:
        old = SampleJob.load(path)
    except ConfigError:
        return False
    return old.model_copy(update={"output_dir": ""}) == job.model_copy(update={"output_dir": ""})


def launch_job(opened: OpenedRun, *, engine_python: str | None = None, **options: object) -> Child:
    """Start (or attach to, or have go on) the child of an opened run, with as many processes as the job says.

    options: fields of :class:`Launch`, such as ``steps_this_run`` with its ``owner``.
    """
    settings = Launch(kind=opened.job.kind, engine_python=engine_python, lower_plan=lower_plan if opened.job.kind == "train" else None)
    distributed = getattr(opened.job, "distributed", None)
    if distributed is not None:
        settings = replace(
            settings, num_processes=distributed.num_processes, num_machines=distributed.num_machines, machine_rank=distributed.machine_rank,
            main_process_ip=distributed.main_process_ip, main_process_port=distributed.main_process_port, launcher=distributed.launcher, devices=distributed.devices,
        )  # fmt: skip
    return start(opened.run.path, launch=settings, **options)


