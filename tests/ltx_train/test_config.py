"""Job files: YAML as people write it, faults named by line or field, paths from where the user stands."""

import os

import pytest
import yaml

from ltx_train.config import PreprocessJob, SampleJob, TrainConfig, _YamlLoader, describe_field, parse_section
from ltx_train.data.dataset import DataSection
from ltx_train.errors import ConfigError

PLAIN = """
model: {model_path: m.safetensors}
lora: {rank: 4, alpha: 4}
data: {dataset: clips}
optimization: {steps: 10}
"""


def load(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return TrainConfig.load(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_any_encoding_that_editors_save(tmp_path, encoding):
    text = (PLAIN + "output_dir: läufe/1\n").replace("\n", "\r\n")
    assert load(tmp_path, text.encode(encoding)).output_dir == "läufe/1"


def test_off_no_and_dates_are_words_and_truth_values_take_them(tmp_path):
    found = load(tmp_path, PLAIN + "output_dir: 2024-11-30\nacceleration: {compile: off, mixed_precision_mode: no, allow_tf32: no, load_text_encoder_in_8bit: yes}\n")
    assert (found.output_dir, found.acceleration.compile, found.acceleration.mixed_precision_mode) == ("2024-11-30", "off", "no")
    assert found.acceleration.allow_tf32 is False and found.acceleration.load_text_encoder_in_8bit is True


def test_what_is_saved_loads_back(tmp_path):
    found = load(tmp_path, PLAIN.replace("dataset: clips", "dataset: clips, clips: {audio: off}") + "acceleration: {compile: off}\n")
    found.save(tmp_path / "again.yaml")
    assert TrainConfig.load(tmp_path / "again.yaml") == found and [p.name for p in tmp_path.glob("*tmp*")] == []


FAULTS = {
    "tab": (PLAIN.replace("model: {", "model:\n\tx: {"), "config.yaml", "line 3", "spaces, not tabs"),
    "twice": (PLAIN + "lora: {rank: 8}\n", "config.duplicate", "lora stands twice: in line 3 and in line 6", "remove or join"),
    "twice inside": (PLAIN.replace("rank: 4", "rank: 4, rank: 8"), "config.duplicate", "rank stands twice", ""),
    "backslash": (PLAIN + 'output_dir: "C:\\Users\\me"\n', "config.yaml", "line 6", "single quotes"),
    "open": (PLAIN + "wandb: {\n", "config.yaml", "is not readable YAML", ""),
    "no mapping": ("- a\n- b\n", "config.yaml", "no mapping of sections", "model:, data:"),
    "binary": (bytes(range(256)), "config.yaml", "is not readable YAML", ""),
    "deep": ("a: " + "[" * 1200, "config.yaml", "nested too deeply", ""),
    "unknown": (PLAIN.replace("rank", "rang"), "config.invalid", "lora.rang: there is no such field; nearest: lora.rank", ""),
    "word": (PLAIN.replace("10", "ten"), "config.invalid", "optimization.steps", "steps: Optimizer steps in all"),
    "neither of two": (PLAIN + "acceleration: {stream_blocks: many}\n", "config.invalid", "stream_blocks: Input should be a valid integer, unable to parse string as an integer, or 'auto' (got", "stay in RAM"),
    "number as a word": (PLAIN + "output_dir: 7\n", "config.invalid", "output_dir", "needs quotes"),
    "infinite": (PLAIN.replace("steps: 10", "learning_rate: .inf"), "config.invalid", "optimization.learning_rate: Input should be a finite number", ""),
    "nan": (PLAIN.replace("alpha: 4", "alpha: .nan"), "config.invalid", "lora.alpha", ""),
    "no loss": (PLAIN + "flow_matching: {video_weight: 0}\n", "config.invalid", "video_weight 0: nothing that is generated counts", ""),
    "no level counts": (PLAIN + "flow_matching: {weighting: min_snr, timestep_sampling_mode: fixed, timestep_sampling_params: {values: [0, 1]}}\n", "config.invalid", "weighting min_snr counts nothing at the noise levels 0 and 1", ""),
    "in RAM": (PLAIN.replace("steps: 10", "optimizer_type: adafactor") + "acceleration: {optimizer_in_ram: on}\n", "config.invalid", "optimizer_in_ram: on goes with optimizer_type adamw", ""),
    "in RAM, amsgrad": (PLAIN.replace("steps: 10", "optimizer_params: {amsgrad: true}") + "acceleration: {optimizer_in_ram: on}\n", "config.invalid", "(without amsgrad)", ""),
    "adafactor": (PLAIN.replace("steps: 10", "optimizer_type: adafactor, optimizer_params: {d: 0.5}"), "config.invalid", "the optimizer adafactor, d: Input should be greater than or equal to 1", ""),
    "sampler": (PLAIN + "flow_matching: {timestep_sampling_params: {stdd: 1}}\n", "config.invalid", "the noise level sampler shifted_logit_normal has no parameter 'stdd'; known: std", ""),
    "url": (PLAIN.replace("m.safetensors", "m.safetensors, load_checkpoint: 'http://host/l.safetensors'"), "config.invalid", "load_checkpoint is a URL", ""),
    "no model": (PLAIN.replace("m.safetensors", '""'), "config.invalid", "model_path is empty", ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_clear_line_for_each_fault(tmp_path, name):
    text, code, message, hint = FAULTS[name]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert caught.value.code == code and message in caught.value.message and hint in caught.value.hint
    assert len(caught.value.message) < 120 and caught.value.hint


TRUE_FOR_ONE = {
    "a number": ("lora: {alpha: true}", "lora.alpha: Input should be a number"),
    "at the top": ("seed: false", "seed: Input should be a number, not true or false (got False)"),
    "optional": ("validation: {interval: true}", "validation.interval: Input should be a number"),
    "or auto": ("acceleration: {stream_blocks: true}", "acceleration.stream_blocks: Input should be a number"),
    "in a list": ("validation: {video_dims: [64, 64, true]}", "validation.video_dims.2: Input should be a number"),
    "in a mapping": ("lora: {rank_pattern: {to_k: true}}", "lora.rank_pattern.to_k: Input should be a number"),
    "free mapping": ("optimization: {optimizer_params: {betas: [0.9, true]}}", "betas.1: Input should be a number"),
    "sampler": ("flow_matching: {timestep_sampling_params: {std: true}}", "std: Input should be a number"),
    "deep": ("data: {dataset: c, stages: [{from_step: true}]}", "data.stages.0.from_step: Input should be a number"),
    "strategy": ("training_strategy: {first_frame_conditioning_p: true}", "first_frame_conditioning_p: Input should be a number"),
    "older field": ("validation: {guidance_scale: true}", "validation.video_cfg_scale: Input should be a number"),
    "a word": ("optimization: {steps: yes}", "optimization.steps: Input should be a valid integer"),
}


@pytest.mark.parametrize("name", TRUE_FOR_ONE)
def test_true_is_not_taken_for_one(name):
    text, said = TRUE_FOR_ONE[name]
    job = {**yaml.safe_load(PLAIN), **yaml.load(text, Loader=_YamlLoader)}
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse(job)
    assert caught.value.code == "config.invalid" and said in caught.value.message


def test_numbers_written_as_words_and_truth_values_of_truth_fields_go_on_to_work(tmp_path):
    more = "flow_matching: {shared_sigma: true, timestep_sampling_params: {std: '1.5'}}\nlogging: {tensorboard: no}\nacceleration: {activation_budget: '0.5', stream_blocks: auto}\n"
    found = load(tmp_path, PLAIN.replace("steps: 10", "learning_rate: 1e-4, steps: '10', betas: ['0.9', 0.99]") + more)
    assert (found.optimization.learning_rate, found.optimization.steps, found.optimization.betas) == (1e-4, 10, (0.9, 0.99))
    assert (found.flow_matching.shared_sigma, found.logging.tensorboard, found.acceleration.activation_budget) == (True, False, 0.5)
    assert found.flow_matching.sampler("video").std == 1.5 and yaml.load("1e-4", Loader=_YamlLoader) == "1e-4"


def test_a_folder_and_a_missing_file(tmp_path):
    for path in (tmp_path, tmp_path / "no.yaml"):
        with pytest.raises(ConfigError) as caught:
            TrainConfig.load(path)
        assert caught.value.code == "config.missing" and caught.value.hint


def test_merge_keys_of_yaml_are_no_duplicates(tmp_path):
    assert load(tmp_path, PLAIN.replace("lora: {rank: 4, alpha: 4}", "lora: {<<: {rank: 4, alpha: 2}, alpha: 4}")).lora.alpha == 4


def test_a_field_is_found_through_lists_and_unions():
    assert describe_field(TrainConfig, ("optimization", "steps")).startswith("steps: ")
    assert describe_field(TrainConfig, ("data", "sources", 0, "folder", "recursive")).startswith("recursive: ")
    assert describe_field(TrainConfig, ("nothing",)) == ""
    with pytest.raises(ConfigError, match="token_budget"):
        parse_section(DataSection, {"dataset": "x", "token_budget": 0})


def test_paths_start_where_the_user_stands_then_beside_the_config(tmp_path, monkeypatch):
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here / "clips", beside / "refs"):
        folder.mkdir(parents=True)
    (beside / "m.safetensors").touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    data = {"sources": [{"kind": "folder", "path": "clips", "reference_video": "refs", "audio": "inside"}], "cache_dir": "~/cache", "held_out_root": "held"}
    sample = {"prompt": "p", "conditions": [{"type": "first_frame", "image_or_video": "first.png"}]}
    job = TrainConfig.parse(
        {"model": {"model_path": "m.safetensors", "text_encoder_path": "te"}, "lora": {}, "data": data, "validation": {"samples": [sample]}, "output_dir": "out"}
    ).resolved(beside)
    assert (job.model.model_path, job.model.text_encoder_path) == (str(beside / "m.safetensors"), str(here / "te"))
    assert (job.data.sources[0].path, job.data.cache_dir, job.output_dir) == (str(here / "clips"), str(tmp_path / "cache"), str(here / "out"))
    assert job.data.held_out_root == str(here / "held")
    assert job.data.sources[0].audio == "inside", "folders of roles may lie inside the source"
    assert job.validation.samples[0].conditions[0].image_or_video == str(here / "first.png")
    os.chdir(tmp_path)
    assert job.resolved() == job


def test_the_home_of_nobody_is_a_name_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = SampleJob.parse({"model": {"model_path": "~nobody-here/x.safetensors"}}).resolved()
    assert job.model.model_path == str(tmp_path / "~nobody-here" / "x.safetensors")


def test_the_other_jobs_resolve_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample = SampleJob.parse({"model": {"model_path": "m"}, "loras": [{"path": "l"}], "output_dir": "o"}).resolved()
    assert (sample.model.model_path, sample.loras[0].path, sample.output_dir) == tuple(str(tmp_path / n) for n in "mlo")
    made = PreprocessJob.parse({"model": {"model_path": "m"}, "data": {"dataset": "d"}}).resolved()
    assert made.data.dataset == str(tmp_path / "d")
