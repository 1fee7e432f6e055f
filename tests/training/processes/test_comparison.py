"""Flags of processes are compared by name, and a difference is named with who has which value."""

import os
from dataclasses import replace

import pytest

from gspmd.commands.settings import RunSettings, facts_of
from gspmd.training import processes
from gspmd.training.processes import comparison
from gspmd.training.processes.comparison import differences
from gspmd.training.toml import ConfigError


@pytest.mark.parametrize(("values", "said"), [
    (["8", "8", "8"], []),
    (["8", "16"], ["batch is 8 in process 0, but 16 in process 1 (on m1)."]),
    (["16", "8", "8"], ["batch is 8 in processes 1 and 2, but 16 in process 0 (on m0)."]),
    (["8"] * 4 + ["9"], ["batch is 8 in processes 0 to 3, but 9 in process 4 (on m4)."]),
    (["8", "9", "8", "7", "8"],
     ["batch is 8 in processes 0, 2, 4, but 9 in process 1 (on m1), and 7 in process 3 (on m3)."]),
    (["8", None, ""], ["batch is 8 in process 0, but absent in process 1 (on m1), and empty in process 2 (on m2)."]),
])  # fmt: skip
def test_a_difference_is_named_by_field_and_process(values, said):
    facts = [{"steps": "4"} | ({} if value is None else {"batch": value}) for value in values]
    assert differences([f"m{number}" for number in range(len(values))], facts) == said


def test_a_long_value_is_cut():
    (line,) = differences(["a", "b"], [{"data": "x" * 5000}, {"data": "y"}])
    assert len(line) < 400


@pytest.fixture
def as_first(monkeypatch):
    """A function of facts of another process: this one is the first of two, and the other has sent those."""

    def pretend(others):
        sent = {}
        monkeypatch.setattr(comparison, "count", lambda: 2)
        monkeypatch.setattr(comparison, "told", lambda make: make())
        flat = dict(comparison._flat(others))

        def gathered(text):
            sent["own"] = text
            return [text, comparison.json.dumps(["other", flat])]

        monkeypatch.setattr(comparison, "gathered", gathered)
        return sent

    return pretend


def refused(facts):
    with pytest.raises(ConfigError) as caught:
        processes.compare(lambda: facts)
    return caught.value.faults


def test_every_setting_of_a_run_is_compared(as_first, tmp_path):
    settings = RunSettings()
    facts = facts_of(settings)
    as_first(facts)
    processes.compare(lambda: facts)
    changed = {
        "training.batch": replace(settings, training=replace(settings.training, batch=64)),
        "training.data": replace(settings, training=replace(settings.training, data=("other.txt",))),
        "training.seed": replace(settings, training=replace(settings.training, seed=7)),
        "optimizer.learning_rate": replace(settings, optimizer=replace(settings.optimizer, learning_rate=1.0)),
        "model.embed": replace(settings, model=replace(settings.model, embed=512)),
        "sharding.set": replace(settings, sharding=replace(settings.sharding, set=("ffn.w_in=EF",))),
        "sharding.lowering": replace(settings, sharding=replace(settings.sharding, lowering="xla")),
        "sharding.mesh": replace(settings, sharding=replace(settings.sharding, mesh="x=2,y=4")),
        "compile_cache": replace(settings, compile_cache=False),
    }
    for name, other in changed.items():
        as_first(facts_of(other))
        assert [line.split(" is ")[0] for line in refused(facts)] == [name]


def test_what_each_process_is_told_for_itself_is_not_compared():
    settings = RunSettings()
    one, two = (
        facts_of(replace(settings, config=f"{which}.toml", sharding=replace(
            settings.sharding, distributed=f"host:1,processes=2,process={which}"
        )))
        for which in (0, 1)
    )  # fmt: skip
    assert one == two


def test_a_layout_file_of_one_name_and_other_lines_is_refused(as_first, tmp_path):
    file = tmp_path / "own.toml"
    settings = replace(RunSettings(), sharding=replace(RunSettings().sharding, layout=str(file)))
    settings = replace(settings, training=replace(settings.training, relayout=(f"20={file}",)))
    found = []
    for spec in ("E_xF_y", "E_yF_x"):
        file.write_text(f'base = "zero-3"\n[ffn]\nw_in = "{spec}"\n')
        found.append(facts_of(settings))
    as_first(found[1])
    assert refused(found[0]) == (
        "layout.ffn.w_in is E_xF_y in process 0, but E_yF_x in process 1 (on other).",
        "layout after 20.ffn.w_in is E_xF_y in process 0, but E_yF_x in process 1 (on other).",
    )


def test_other_versions_and_other_options_are_refused(as_first, monkeypatch):
    mine = processes.environment()
    others = {**mine, "version": {**mine["version"], "jax": "0.9", "gspmd's source": "an older checkout"}}
    as_first({**others, "option": {**mine["option"], "jax_enable_x64": "True"}})
    names = [line.split(" is ")[0] for line in refused(mine)]
    assert names == ["version.gspmd's source", "version.jax", "option.jax_enable_x64"]
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "--xla_b=1 --xla_dump_to=/mine --xla_a=2")
    assert processes.environment()["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"
