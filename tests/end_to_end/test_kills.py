"""Kills of the real child at random moments, from its start to its saves: the end is the same as without any, bit for bit.

Three modes and optimizers run always; ``LTX_TRAIN_LONG=1`` runs them all, a full fine-tuning, other families, and 2 and 4 ranks.
"""

import os
import random
import time

import pytest

from ltx_train.conditioning.modes import MODES
from ltx_train.errors import RunError
from ltx_train.training.snapshots import newest_valid
from tests.end_to_end.corridor import ORDER, draw_everything, finish, fork, furthest, noted_order, order, same, train
from tests.end_to_end.test_modes import strategy_of

LONG = os.environ.get("LTX_TRAIN_LONG") == "1"
STEPS = 8
EMA = {"ema": {"decay": 0.9}}
TWICE = {"gradient_accumulation_steps": 2}
SMALL = {"optimizer_params": {"min_8bit_size": 16}}  # tiny tensors have 8-bit state too

# id: mode, optimizer, further fields of the optimization section, other sections
CASES = {
    "t2v with sound": ("t2v_audio", "adamw", {**TWICE, "scheduler_type": "cosine", "warmup_steps": 2}, {"lora": {"dropout": 0.3}, "flow_matching": {"balance": "auto"}}),
    "inpaint with masks": ("inpaint", "adafactor", {**EMA}, {}),
    "v2v": ("v2v", "prodigy", {**TWICE}, {"lora": {"dropout": 0.2}}),
}
MORE = {
    "i2v": ("i2v_audio", "adamw8bit", {**EMA, **SMALL}, {"lora": {"kind": "dora", "dropout": 0.2}}),
    "a2v": ("a2v", "adamw_schedulefree", {**TWICE}, {}),
    "t2a": ("t2a", "lion8bit", {**EMA, **TWICE, **SMALL, "learning_rate": 1e-3}, {}),
    "v2a": ("v2a", "paged_ademamix8bit", {**SMALL, "scheduler_type": "linear"}, {"lora": {"dropout": 0.5}}),
    "a2a": ("a2a", "adamw", {**EMA, **TWICE}, {"lora": {"kind": "loha"}}),
    "av2av": ("av2av", "adamw_schedulefree", {}, {"lora": {"dropout": 0.2}}),
    "voice": ("voice", "prodigy", {**EMA}, {}),
    "inpaint, random masks": ("inpaint_random", "adamw8bit", {**TWICE, **SMALL}, {}),
    "a sound's gaps": ("audio_inpaint", "adamw", {**EMA, "scheduler_type": "cosine_with_restarts"}, {"lora": {"kind": "rslora"}}),
    "first and last frame": ("first_last", "ademamix8bit", {**SMALL, **EMA}, {}),
    "extend": ("extend_any", "paged_adamw", {**TWICE}, {}),
    "outpaint": ("outpaint_random", "paged_lion8bit", {**SMALL, "learning_rate": 1e-3}, {}),
    "keyframes, LTX-2.5": ("keyframes", "paged_adamw8bit", {**TWICE, **SMALL}, {"family": "ltx2.5"}),
    "first frame, LTX-Video": ("i2v", "adamw8bit", {**SMALL}, {"family": "ltxv-2b"}),
    "all weights": ("t2v", "adafactor", {**EMA, "learning_rate": 1e-3}, {"lora": None, "model": {"training_mode": "full"}}),
}


def settings(home, out, case, data, interval=1, **sections):
    mode, optimizer, optimization, others = {**CASES, **MORE}[case]
    merged = {name: value for name, value in others.items() if name != "family"}
    job = home.job(
        out, others.get("family", "ltx2.3"), training_strategy=strategy_of(MODES[mode]), data={"preprocessed_data_root": str(data), "caption_dropout": 0.5},
        optimization={"steps": STEPS, "batch_size": 1, "optimizer_type": optimizer, **optimization}, checkpoints={"interval": interval, "keep_last_n": 2},
        **{**{name: value for name, value in merged.items() if name != "lora"}, **sections},
    )  # fmt: skip
    if merged.get("lora", {}) is None:
        del job["lora"]
    else:
        job["lora"] = {**job["lora"], **merged.get("lora", {}), **sections.get("lora", {}), "target_modules": list(MODES[mode].target_modules)}
    return type(home.config(out, **{"data": job["data"]})).parse(job)


def newest(path):
    valid = newest_valid(path)
    return int(valid.name[-5:]) if valid else 0


def seconds_until(path, step, most, children):
    """Wait for a snapshot of that step (or a child's end), at most so long; how long it took."""
    began = time.monotonic()
    while newest(path) < step and all(child.is_alive() for child in children) and time.monotonic() < began + most:
        time.sleep(0.002)
    return time.monotonic() - began


def kill_at_random(config, seed, kills, pace, ranks=1, notes=None):
    """Start and kill the training ``kills`` times, within its start or within the steps and saves after a random snapshot.

    pace: seconds that a step takes. Returns the step that was kept after each kill.
    """
    path, draw, reached, start = config.output_dir, random.Random(seed), [0], 0.0
    for number in range(kills):
        children = fork(config, ranks, **({ORDER: str(notes)} if notes else {}))
        further = 1 if number == 0 else draw.choice([0, 1, 1, 2, 3])
        last = STEPS - 3  # wherever the kill was to come: so far from the end that it is not too late
        began = seconds_until(path, min(reached[-1] + further, last), 300, children)
        start = start or began
        if further:
            seconds_until(path, last, draw.uniform(0, 1.5 * pace), children)
        else:
            seconds_until(path, min(reached[-1] + 1, last), draw.uniform(0, start), children)
        for child in draw.sample(children, len(children)):
            child.kill()
        for child in children:
            child.join()
        assert children[0].exitcode == -9, f"kill {number + 1} came too late: the run had ended"
        reached.append(newest(path))
    assert reached == sorted(reached) and 1 <= reached[1] and reached[-1] < STEPS, f"a kill lost a snapshot, or came too late: {reached}"
    return reached[1:]


def pace(done):
    """Seconds of a usual step."""
    return sorted(event.seconds for event in done.steps.values())[STEPS // 2]


def rates(done):
    return [(step, event.learning_rate, event.epoch, event.grad_norm, event.loss_average) for step, event in sorted(done.steps.items())]


@pytest.mark.parametrize("case", CASES)
def test_kill_9_at_random_moments(home, tmp_path, case):
    assert_unharmed_by_kills(home, tmp_path, case, home.cache("ltx2.3"), 4 if LONG else 3)


def assert_unharmed_by_kills(home, tmp_path, case, data, count):
    """The case undisturbed and killed ``count`` times: every number and every file's bytes agree."""
    with noted_order(tmp_path / "whole.order"):
        whole = train(settings(home, tmp_path / "whole", case, data, interval=None))
    config = settings(home, tmp_path / "killed", case, data)
    reached = kill_at_random(config, case, count, pace(whole), notes=tmp_path / "killed.order")
    done = finish(fork(config, **{ORDER: str(tmp_path / "killed.order")}), config)
    assert same(whole.snapshot, done.snapshot)
    assert whole.losses == done.losses and len(done.losses) == STEPS and rates(whole) == rates(done)
    assert whole.lora.read_bytes() == done.lora.read_bytes()
    assert order(tmp_path / "whole.order") == order(tmp_path / "killed.order")
    return reached


# -- the long proof --


@pytest.fixture(scope="module")
def five(home, tmp_path_factory):
    """Caches by family of five clips with sound and every role."""
    table = draw_everything(tmp_path_factory.mktemp("five"), 5)
    return lambda family: home.cache(family, table)


@pytest.mark.skipif(not LONG, reason="LTX_TRAIN_LONG=1 kills every mode")
@pytest.mark.parametrize("case", MORE)
def test_kill_9_in_every_mode(home, tmp_path, five, case):
    reached = assert_unharmed_by_kills(home, tmp_path, case, five(MORE[case][3].get("family", "ltx2.3")), 3)
    print(f"{case}: kept steps {reached}")


@pytest.mark.skipif(not LONG, reason="LTX_TRAIN_LONG=1 adds kills between which the job is changed")
def test_what_may_change_between_kills_and_what_may_not(home, tmp_path, five):
    """Previews, logging and the number of loading threads differ at every start and change nothing; another rank is refused and spoils nothing."""
    data, case = five("ltx2.3"), "t2v with sound"
    whole = train(settings(home, tmp_path / "whole", case, data, interval=None))
    previews = {"samples": [{"prompt": "a red block"}], "video_dims": [32, 32, 9], "inference_steps": 1, "interval": 3}
    changes = [{"validation": previews}, {"logging": {"csv": True}, "checkpoints": {"interval": 2, "keep_last_n": 0}}, {}]
    sections = lambda change: {"interval": change.get("checkpoints", {}).get("interval", 1), **{n: v for n, v in change.items() if n != "checkpoints"}}  # noqa: E731
    for number, change in enumerate(changes):
        config = settings(home, tmp_path / "killed", case, data, **sections(change))
        if number < 2:
            before = newest(tmp_path / "killed")
            (child,) = fork(config)
            while newest(tmp_path / "killed") <= before and child.is_alive():
                time.sleep(0.005)
            child.kill()
            child.join()
            assert child.exitcode == -9
            with pytest.raises(RunError) as caught:
                train(settings(home, tmp_path / "killed", case, data, lora={"rank": 3}))
            assert caught.value.code == "run.identity"
        else:
            done = finish(fork(config), config)
    assert same(whole.snapshot, done.snapshot) and rates(whole) == rates(done)


@pytest.mark.skipif(not LONG, reason="LTX_TRAIN_LONG=1 kills several ranks")
@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(1, 2, 2), (2, 1, 2), (4, 1, 1)])
def test_kill_9_of_several_ranks(home, tmp_path, five, ranks, batch, accumulation):
    """However many ranks share the four samples of a step, killed and gone on with: within 1e-5 of one rank, on the same samples at the same rates."""
    base = {"steps": STEPS, "learning_rate": 1e-3, "optimizer_params": {"eps": 1e-3}, "scheduler_type": "cosine", "warmup_steps": 1, **EMA}
    strategy = strategy_of(MODES["i2v_audio"])

    def job(out, batch, accumulation, interval=1):
        size = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
        return home.config(
            out, training_strategy=strategy, data={"preprocessed_data_root": str(five("ltx2.3")), "caption_dropout": 0.3},
            optimization={**base, **size}, checkpoints={"interval": interval, "precision": "float32"},
        )  # fmt: skip

    with noted_order(tmp_path / "alone.order"):
        alone = train(job(tmp_path / "alone", 4, 1, interval=None))
    config = job(tmp_path / "killed", batch, accumulation)
    reached = kill_at_random(config, ranks, 3, pace(alone), ranks, tmp_path / "killed.order")
    done = finish(fork(config, ranks, **{ORDER: str(tmp_path / "killed.order")}), config)
    away = max(furthest(done.snapshot, alone.snapshot), furthest(done.snapshot, alone.snapshot, "ema"))
    print(f"{ranks} ranks: kept steps {reached}, furthest weight {away:.1e} from one rank's")
    assert away < 1e-5
    assert done.losses == pytest.approx(alone.losses, rel=2e-5)
    assert [(s, e.learning_rate, e.epoch) for s, e in sorted(done.steps.items())] == [(s, e.learning_rate, e.epoch) for s, e in sorted(alone.steps.items())]
    assert order(tmp_path / "killed.order") == order(tmp_path / "alone.order")
