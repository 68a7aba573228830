"""Widgets are derived from sections and give the sections back."""

from typing import Annotated

import pytest
from pydantic import TypeAdapter

SECTIONS = ("LoraSection", "OptimizationSection", "FlowMatchingSection", "ValidationSection", "AccelerationSection", "CheckpointsSection", "DistributedSection", "DataSection")
NOT_SHOWN = {"DataSection": {"sources", "stages", "clips", "captions"}, "ValidationSection": {"samples"}, "OptimizationSection": {"ema"}}


def section_of(pack, name):
    return getattr(pack.engine("config"), name)


def shown(pack, name):
    section = section_of(pack, name)
    return section, [field for field in section.model_fields if field not in NOT_SHOWN.get(name, ())]


def as_tuple(value):
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("name", SECTIONS)
def test_a_fields_default_comes_back_from_its_widget(pack, name):
    section, names = shown(pack, name)
    for one, field in zip(pack.schema.inputs_of(section, names), names):
        default = section.model_fields[field].get_default(call_default_factory=True)
        back = pack.schema.value_of(field, section.model_fields[field], one.default)
        assert as_tuple(back) == as_tuple(default), field


@pytest.mark.parametrize("name", ("LoraSection", "OptimizationSection", "FlowMatchingSection", "AccelerationSection", "CheckpointsSection", "DistributedSection"))
def test_a_widgets_bounds_and_choices_are_allowed_by_the_section(pack, name):
    section, names = shown(pack, name)
    for one, field in zip(pack.schema.inputs_of(section, names), names):
        info = section.model_fields[field]
        values = [getattr(one, "min", None), getattr(one, "max", None)] if one.io_type in ("INT", "FLOAT") else list(one.options or ())
        for value in values:
            back = pack.schema.value_of(field, info, value)
            kind = pack.schema.Kind(info)
            if one.io_type == "FLOAT" and (kind.open_low and back == kind.low or kind.open_high and back == kind.high):
                continue  # an excluded bound itself is told by the section
            allowed = TypeAdapter(Annotated.__class_getitem__((info.annotation, *info.metadata)) if info.metadata else info.annotation)
            assert allowed.validate_python(back) == back, (field, value)  # raises where the section would


def test_not_set_is_none_and_a_number_is_a_number(pack):
    section = section_of(pack, "CheckpointsSection")
    read = lambda value: pack.schema.values_of(section, {"interval": value})["interval"]  # noqa: E731
    assert read(0) is None and read(250) == 250


def test_an_absent_widget_keeps_the_default(pack):
    section = section_of(pack, "LoraSection")
    assert pack.schema.values_of(section, {"dropout": 0.25}) == {"dropout": 0.25}


def test_lists_and_mappings_are_written_as_lines(pack):
    section = section_of(pack, "LoraSection")
    found = pack.schema.values_of(section, {"target_modules": "to_k; to_q\n\n to_v ", "rank_pattern": "audio = 16\nff=8"})
    assert found == {"target_modules": ["to_k", "to_q", "to_v"], "rank_pattern": {"audio": 16, "ff": 8}}
    section.model_validate(found)


@pytest.mark.parametrize("text, code", [("audio 16", "widget.pairs"), ("= 4", "widget.pairs")])
def test_a_mapping_that_cannot_be_read_is_told(pack, text, code):
    error = pack.engine("errors").ConfigError
    with pytest.raises(error) as told:
        pack.schema.values_of(section_of(pack, "LoraSection"), {"rank_pattern": text})
    assert told.value.code == code


def test_numbers_with_commas(pack):
    section = section_of(pack, "OptimizationSection")
    assert pack.schema.values_of(section, {"betas": "0.9, 0.95"})["betas"] == [0.9, 0.95]
    assert pack.schema.values_of(section, {"betas": ""})["betas"] is None
    with pytest.raises(pack.engine("errors").ConfigError):
        pack.schema.values_of(section, {"betas": "a, b"})


def test_auto_or_a_number(pack):
    section = section_of(pack, "AccelerationSection")
    read = lambda text: pack.schema.values_of(section, {"stream_blocks": text})["stream_blocks"]  # noqa: E731
    assert read("auto") == "auto" and read("12") == 12
    with pytest.raises(Exception, match="auto|integer"):
        section.model_validate({"stream_blocks": read("many")})


def chosen(pack, node, name, key):
    """What ComfyUI passes for a dynamic combo left at a choice's defaults."""
    combo = next(one for one in pack.nodes[node].define_schema().inputs if one.id == name)
    option = next(o for o in combo.options if o.key == key)
    return {name: {name: key, **{one.id: one.default for one in option.inputs}}}


def test_every_optimizer_and_schedule_of_the_tables_can_be_chosen(pack):
    node, section = pack.nodes["LTXTrainOptimizerSettings"], section_of(pack, "OptimizationSection")
    combos = {one.id: [o.key for o in one.options] for one in node.define_schema().inputs if one.io_type.startswith("COMFY_DYN")}
    optimizers, schedules = pack.engine("training.optim").OPTIMIZERS, pack.engine("training.schedule").SCHEDULES
    assert combos["optimizer_type"][0] == "adamw" and set(combos["optimizer_type"]) == set(optimizers)
    assert set(combos["scheduler_type"]) == {"auto", *schedules}
    for key in optimizers:
        found = section.model_validate(node.fields(chosen(pack, "LTXTrainOptimizerSettings", "optimizer_type", key)))
        assert found.optimizer_type == key and found.optimizer() == optimizers[key]()
    for key in schedules:
        found = section.model_validate(node.fields(chosen(pack, "LTXTrainOptimizerSettings", "scheduler_type", key)))
        assert found.scheduler_type == key and found.schedule() == schedules[key]()
    for key in ("off", "on"):
        found = section.model_validate(node.fields(chosen(pack, "LTXTrainOptimizerSettings", "ema", key)))
        assert (found.ema is not None) == (key == "on")


def test_every_sampler_can_be_chosen_for_both_streams(pack):
    node, section = pack.nodes["LTXTrainObjectiveSettings"], section_of(pack, "FlowMatchingSection")
    for stream in ("timestep_sampling_mode", "audio_timestep_sampling_mode"):
        for key in pack.engine("training.flow_matching").SAMPLERS:
            values = chosen(pack, "LTXTrainObjectiveSettings", stream, key)
            if key == "fixed":
                values[stream]["values"] = "0.9, 0.5"
            found = section.model_validate(node.fields(values))
            assert getattr(found, stream) == key


def test_settings_nodes_left_alone_say_what_the_sections_say(pack):
    """All widgets at their defaults give a section that differs from its own defaults only where the node says so."""
    better = {"optimization": {"batch_size"}, "checkpoints": {"interval", "keep_last_n"}, "validation": {"video_dims"}, "lora": set(), "flow_matching": set(), "acceleration": set(), "distributed": set()}
    names = {"lora": "LoraSection", "optimization": "OptimizationSection", "flow_matching": "FlowMatchingSection", "validation": "ValidationSection", "acceleration": "AccelerationSection", "checkpoints": "CheckpointsSection", "distributed": "DistributedSection"}
    seen = set()
    for name, node in pack.nodes.items():
        if not name.endswith("Settings") or name in ("LTXTrainModeSettings", "LTXTrainClipSettings"):
            continue
        widgets = {}
        for one in node.define_schema().inputs:
            widgets[one.id] = {one.id: one.options[0].key, **{i.id: i.default for i in one.options[0].inputs}} if one.io_type.startswith("COMFY_DYN") else one.default
            if one.io_type == "COMBO" and one.default is None:
                widgets[one.id] = one.options[0]
        section = section_of(pack, names[node.section])
        made, plain = section.model_validate(node.fields(widgets)), section()
        differing = {field for field in section.model_fields if getattr(made, field) != getattr(plain, field)}
        assert differing == better[node.section], name
        seen.add(node.section)
    assert seen == set(better)


def test_a_field_of_a_choice_that_a_prompt_leaves_out_keeps_its_default(pack):
    """ComfyUI passes None for it."""
    tools, schema = pack.engine("tools"), pack.schema
    given = {"captioner": "endpoint", "url": "http://127.0.0.1:9/v1", "pause": None, "fps": None, "thinking": None}
    assert schema.choice_of("captioner", tools.CAPTIONERS, given) == ("endpoint", {"url": "http://127.0.0.1:9/v1"})
