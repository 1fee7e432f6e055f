"""Training settings: what cannot be is refused, with the field, the fact and the figure."""

import re
from dataclasses import dataclass, field

import pytest

from gspmd.annotate import LayoutError
from gspmd.commands.settings import RunSettings
from gspmd.layouts import Layout
from gspmd.lowerings.names import LOWERINGS
from gspmd.training.config import ConfigError, OptimizerConfig, ShardingConfig, TrainingConfig, load_toml, parse_mesh
from gspmd.training.data.sources import matching


def faults(make, **fields):
    with pytest.raises(ConfigError) as error:
        make(**fields)
    return error.value.faults


def test_negative_numbers():
    assert faults(TrainingConfig, steps=-5, batch=0, save_every=-1) == (
        "steps must be positive, but is -5.",
        "batch must be positive, but is 0.",
        "save_every must not be negative, but is -1.",
    )
    assert faults(OptimizerConfig, learning_rate=-1.0) == ("learning_rate must be positive, but is -1.0.",)
    assert faults(ShardingConfig, devices=-8) == ("devices must be positive, but is -8.",)


def test_not_a_number():
    assert faults(OptimizerConfig, learning_rate=float("nan")) == ("learning_rate must be positive, but is nan.",)
    assert faults(OptimizerConfig, clip=float("inf")) == ("clip must be finite, but is inf.",)


def test_shares():
    wanted = ("validation_fraction must be between 0 and 1, but is 1.0.",)
    assert faults(TrainingConfig, validation_fraction=1.0) == wanted
    assert faults(OptimizerConfig, warmup=2.0) == ("warmup must be between 0 and 1, but is 2.0.",)


@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("beta", [1.0, -0.1, float("nan")])
def test_moments_decay(name, beta):
    assert faults(OptimizerConfig, **{name: beta}) == (f"{name} must be at least 0 and less than 1, but is {beta}.",)
    assert not getattr(OptimizerConfig(**{name: 0.0}), name)


def test_what_the_objective_does_not_use_is_refused():
    assert faults(TrainingConfig, source_length=512, noise_density=0.5, data_source="en", data_prompt="q") == (
        "source_length is 512, but the objective is next-token, which does not use it; leave it out, or set objective "
        "to span-corruption or prefix or pairs.",
        "noise_density is 0.5, but the objective is next-token, which does not use it; leave it out, or set objective "
        "to span-corruption.",
        "data_source is 'en', but the objective is next-token, which does not use it; leave it out, or set objective "
        "to pairs.",
    )
    assert faults(TrainingConfig, objective="span-corruption", pack=True, mean_span=0.5, noise_density=1.0) == (
        "noise_density must be between 0 and 1, but is 1.0.",
        "mean_span must be at least 1, but is 0.5.",
        "pack is True, but the objective is span-corruption, which does not use it; leave it out, or set objective to "
        "next-token or pairs.",
    )
    assert TrainingConfig(pack=True, data_prompt="q").objective == "next-token"


def test_choices():
    assert faults(TrainingConfig, dtype="int3") == ("dtype must be one of 'float32', 'bfloat16', but is 'int3'.",)
    assert faults(ShardingConfig, lowering="bloking") == (
        "lowering must be one of 'auto', 'xla', 'blocking', 'looped', 'looped:halves', "
        "'looped:paired', but is 'bloking'. Did you mean 'blocking'?",
    )


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_lowering_may_be_asked_for(lowering):
    assert ShardingConfig(lowering=lowering).lowering == lowering


def test_seed_and_the_next_one_fit_a_key():
    assert TrainingConfig(seed=2**32 - 2).seed == 2**32 - 2
    assert faults(TrainingConfig, seed=2**32 - 1) == ("seed must be less than 2**32 - 1, but is 4294967295.",)


def test_processes():
    assert ShardingConfig(distributed="auto").distributed == "auto"
    assert ShardingConfig(distributed="[::1]:8476,processes=2,process=1").distributed
    form = "distributed must be auto or HOST:PORT,processes=N,process=I, but is "
    for wrong in (
        "automatic",
        "node:1",
        "node,processes=2,process=0",
        "node:1,processes=2,process=x",
        "node:1,process=0",
    ):
        assert faults(ShardingConfig, distributed=wrong) == (f"{form}{wrong!r}.",)
    for port in (99999, 65536, 0):
        port_fault = f"distributed has port {port}; give one from 1 to 65535, in 'node:{port},processes=2,process=1'."
        assert faults(ShardingConfig, distributed=f"node:{port},processes=2,process=1") == (port_fault,)
    most = ("distributed has processes 0 to 1, but this one would be process 2.",)
    assert faults(ShardingConfig, distributed="node:1,processes=2,process=2") == most


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("5", "profile must read FROM:TO, such as 20:24, but is '5'."),
        ("a:b", "profile must read FROM:TO, such as 20:24, but is 'a:b'."),
        ("0:4", "profile is '0:4', but 1 is the first step."),
        ("8:4", "profile is '8:4', but step 4 comes before step 8."),
        ("8:401", "profile is '8:401', but the run has 400 steps; name earlier ones."),
    ],
)
def test_wrong_steps_of_a_profile(text, fault):
    assert faults(TrainingConfig, steps=400, profile=text) == (fault,)


def test_steps_of_a_profile():
    assert TrainingConfig(steps=400, profile="1:400").profile == "1:400"


def test_mesh():
    assert parse_mesh("x=4, y=2") == {"x": 4, "y": 2}
    assert parse_mesh("data=8") == {"data": 8}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x4", "mesh 'x4': 'x4' is not AXIS=SIZE; write x=4,y=2."),
        ("x=4,", "mesh 'x=4,': '' is not AXIS=SIZE; write x=4,y=2."),
        ("x=a", "mesh 'x=a': mesh axis x has size 'a', which is not a whole number of at most 18 digits."),
        ("x=4,x=2", "mesh 'x=4,x=2': mesh axis x appears twice."),
        ("x=-4", "mesh 'x=-4': mesh axis x must have a positive size, but has -4."),
        ("x=²", "mesh 'x=²': mesh axis x has size '²', which is not a whole number of at most 18 digits."),
        ("x=--4", "mesh 'x=--4': mesh axis x has size '--4', which is not a whole number of at most 18 digits."),
        ("x=４", "mesh 'x=４': mesh axis x has size '４', which is not a whole number of at most 18 digits."),
        ("X=4", "mesh 'X=4': mesh axes are named by a lowercase letter and then letters, digits or _, not 'X'."),
        ("x=0", "mesh 'x=0': mesh axis x must have a positive size, but has 0."),
    ],
)
def test_wrong_mesh(text, fault):
    assert faults(ShardingConfig, mesh=text) == (fault,)


def test_changes_to_the_layout():
    assert ShardingConfig(set=("ffn.w_in=E_xF_y", "ffn.w_in=EF")).overrides == {"ffn.w_in": "EF"}
    assert faults(ShardingConfig, set=("ffn.w_in",)) == (
        "set must read KEY=SPEC, such as ffn.w_in=E_xF_y, but is 'ffn.w_in'.",
    )


def test_options_of_the_compiler():
    sharding = ShardingConfig(compiler_options=("xla_a=1", "xla_b=x=y", "xla_a=2"))
    assert sharding.compiled_with == {"xla_a": "2", "xla_b": "x=y"}
    assert faults(ShardingConfig, compiler_options=("xla_a=",)) == (
        "compiler_options must read NAME=VALUE, such as xla_tpu_scoped_vmem_limit_kib=81920, but is 'xla_a='.",
    )


def test_prompt_is_not_empty():
    assert faults(TrainingConfig, prompt="") == (
        "prompt must not be empty: generated text needs something to begin with.",
    )


@dataclass(frozen=True)
class File:
    training: TrainingConfig = field(default_factory=TrainingConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


def test_relative_paths_of_a_file_begin_beside_it(tmp_path, monkeypatch):
    folder = tmp_path / "odd [1]"
    (folder / "text").mkdir(parents=True)
    (folder / "own.toml").write_text('base = "zero-3"')
    for name in ("a.txt", "text/b.txt"):
        (folder / name).write_text(name)
    (folder / "run.toml").write_text('[training]\ndata = ["a.txt", "text/*.txt"]\n[sharding]\nlayout = "own.toml"\n')
    for cwd, path in ((tmp_path, "odd [1]/run.toml"), (folder, "run.toml"), ("/", folder / "run.toml")):
        monkeypatch.chdir(cwd)
        file = load_toml(File, path)
        assert Layout.load(file.sharding.layout)["ffn.w_in"] == "E_xyzF"
        assert [path.name for path in matching(file.training.data)] == ["a.txt", "b.txt"]
    (folder / "run.toml").write_text('[training]\ndata = ["/all.txt"]\n[sharding]\nlayout = "zero-3"\n')
    file = load_toml(File, folder / "run.toml")
    assert (file.training.data, file.sharding.layout) == (("/all.txt",), "zero-3")


def test_a_layout_that_is_not_there_is_named_by_where_it_was_looked_for(tmp_path):
    (tmp_path / "run.toml").write_text('[sharding]\nlayout = "none.toml"\n')
    with pytest.raises(LayoutError, match=re.escape(f"'{tmp_path}/none.toml': there is no such file")):
        Layout.load(load_toml(File, tmp_path / "run.toml").sharding.layout)


def test_blocks_of_moments_that_have_none_are_refused():
    fault = "moments_block is 7, and moments are float32, which have no blocks"
    assert faults(OptimizerConfig, moments_block=7) == (f"{fault}; set moments to int8, or leave moments_block out.",)
    assert OptimizerConfig(moments="int8", moments_block=7).moments_block == 7


def test_a_key_of_another_table_is_answered_with_its_table(tmp_path):
    (tmp_path / "own.toml").write_text("[training]\nlearning_rate = 1e-3\n[optimizer]\nmesh = 'x=4'\n")
    with pytest.raises(ConfigError) as error:
        load_toml(RunSettings, tmp_path / "own.toml")
    assert error.value.faults == (
        "unknown key 'training.learning_rate'; write learning_rate in [optimizer].",
        "unknown key 'optimizer.mesh'; write mesh in [sharding].",
    )
