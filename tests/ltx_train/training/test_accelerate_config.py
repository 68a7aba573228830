"""accelerate's configuration files: the official four, fields taken over, refusals, and the command line that takes one."""

import pytest
import yaml

from ltx_train.cli.training import with_processes
from ltx_train.config import TrainConfig
from ltx_train.errors import ConfigError
from ltx_train.training.accelerate_config import FIELDS, SHIPPED, from_accelerate
from ltx_train.training.parallel import DistributedSection

JOB = {"model": {"model_path": "m.safetensors"}, "lora": {}, "data": {"preprocessed_data_root": "d"}}
NAMES = ("ddp", "ddp_compile", "fsdp", "fsdp_compile")


def names_in(fields):
    return {f"{n}.{k}" for n, v in fields.items() if isinstance(v, dict) for k in v} | {n for n, v in fields.items() if not isinstance(v, dict)}


@pytest.mark.parametrize("name", NAMES)
def test_the_official_four_are_shipped_and_every_field_is_explained(name):
    fields = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"))
    assert fields["distributed_type"] == ("FSDP" if "fsdp" in name else "MULTI_GPU") and fields["num_processes"] == 4 and fields["mixed_precision"] == "bf16"
    accepted = from_accelerate(name)
    assert accepted.section == DistributedSection(num_processes=4)
    assert {row.name for row in accepted.rows} == names_in(fields) and not any("unknown here" in row.becomes for row in accepted.rows)
    assert accepted.settings == ({"acceleration": {"compile": "on"}} if "compile" in name else {})
    assert {row.name for row in accepted.rows if row.taken} >= {"num_processes", "num_machines", "machine_rank"}


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_itself_reads_the_shipped_ones(name):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(SHIPPED / f"{name}.yaml")).num_processes == 4


def test_the_command_line_takes_a_file_and_a_number(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "220")
    config = TrainConfig.parse({**JOB, "distributed": {"timeout_minutes": 5}, "acceleration": {"compile": "off"}})
    taken = with_processes(config, "fsdp_compile", 2)
    assert (taken.distributed.num_processes, taken.distributed.timeout_minutes, taken.acceleration.compile) == (2, 5, "on")
    assert taken.identity() == config.identity(), "the number of processes is no identity"
    assert with_processes(config, None, None) is config and with_processes(config, None, 3).distributed.num_processes == 3
    shown = capsys.readouterr()
    assert "fsdp_config.fsdp_sharding_strategy" in shown.out + shown.err


def test_machines_devices_and_offload(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 4\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\ngpu_ids: 0, 1\n"
        "fsdp_config: {fsdp_offload_params: true, fsdp_activation_checkpointing: true, fsdp_new_thing: 1}\n"
    )
    accepted = from_accelerate(path)
    section = accepted.section
    assert (section.num_machines, section.machine_rank, section.main_process_ip, section.main_process_port, section.devices) == (2, 1, "10.0.0.1", 29500, "0,1")
    assert accepted.settings == {"acceleration": {"optimizer_in_ram": "on"}, "optimization": {"enable_gradient_checkpointing": True}}
    job = TrainConfig.parse(accepted.applied(JOB))
    assert job.acceleration.optimizer_in_ram == "on" and job.optimization.enable_gradient_checkpointing and job.distributed == section
    assert [row.name for row in accepted.rows if "unknown here" in row.becomes] == ["fsdp_config.fsdp_new_thing"]


@pytest.mark.parametrize(
    "text",
    ["distributed_type: DEEPSPEED", "distributed_type: MULTI_GPU\ncompute_environment: AMAZON_SAGEMAKER", "- a", "{", "distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2"],
)
def test_configs_that_cannot_be_taken_over_are_refused(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        from_accelerate(path)
    with pytest.raises(ConfigError):
        from_accelerate(tmp_path / "none.yaml")


def test_every_field_that_is_taken_over_exists():
    from ltx_train.config import known_fields

    known = set(known_fields(TrainConfig))
    taken = {becomes.split(" ")[0] for becomes in FIELDS.values() if becomes.startswith(("distributed.", "acceleration.", "optimization."))}
    assert taken <= known
