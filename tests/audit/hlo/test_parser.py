"""HLO text as XLA prints it for CPU, GPU and TPU, and texts written to mislead."""

import jax
import jax.numpy as jnp
import pytest

from gspmd.audit import hlo


def entry(*lines: str, header: str = "HloModule jit_f, is_scheduled=true", computations: str = "") -> hlo.Module:
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"{header}\n\n{computations}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n")


def instruction(line: str) -> hlo.Instruction:
    return entry(line).entry.instructions[-1]


def test_a_line_of_the_tpu_compiler():
    found = instruction(
        "ROOT %all_gather.1 = bf16[1,4096,4096]{2,1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.151), channel_id=4, "
        "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, use_global_device_ids=true, "
        'frontend_attributes={chain_id="1"}, metadata={op_name="jit(body)/shard_map/all_gather" stack_frame_id=8}, '
        'backend_config={"flag_configs":[],"window_config":{"estimated_cycles":"1234","kernel":["51","2"]}}'
    )
    assert (found.name, found.opcode, found.root) == ("all_gather.1", "all-gather", True)
    assert found.arrays == (hlo.Array("bf16", (1, 4096, 4096)),)
    assert found.bytes == 2 * 4096 * 4096  # tiles look like shapes, and are none
    assert found.operands == ("param_0.151",)
    assert found.attribute("dimensions") == "{1}"
    assert found.attribute("replica_groups") == "{{0,1,2,3},{4,5,6,7}}"
    assert (found.op_name, found.frame, found.cycles) == ("jit(body)/shard_map/all_gather", 8, 1234)
    assert found.config["window_config"]["kernel"] == ["51", "2"]


def test_long_tuples_are_counted_in_comments():
    parts = ", ".join(("/*index=5*/" if n == 5 else "") + f"f32[{n + 1},2]{{1,0}}" for n in range(8))
    names = ", ".join(("/*index=5*/" if n == 5 else "") + f"%a.{n}" for n in range(8))
    found = instruction(f"%t = ({parts}) tuple({names})")
    assert [array.shape for array in found.arrays] == [(n + 1, 2) for n in range(8)]
    assert found.operands == tuple(f"a.{n}" for n in range(8))


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("bf16[0,3]{1,0}", 0),  # no element, no byte
        ("s4[7]{0:E(4)}", 4),  # 28 bits
        ("u4[2,3]{1,0}", 3),
        ("s2[5]{0}", 2),
        ("f8e4m3fn[10]{0}", 10),
        ("f8e8m0fnu[10]{0}", 10),
        ("f4e2m1fn[10]{0}", 5),
        ("c64[2]{0}", 16),
        ("c128[2]{0}", 32),
        ("f32[<=8,2]{1,0}", 64),  # a dynamic dimension takes what it may take
        ("token[]", 0),
        ("(f32[2]{0}, token[], opaque[])", 8),
        ("((f32[64]{0}, /*index=5*/u8[2]{0}), f32[16]{0}, s32[]{:S(2)})", 256 + 2 + 64 + 4),
        ("()", 0),
    ],
)
def test_bytes(written, size):
    assert instruction(f"%a = {written} custom-call(%b)").bytes == size


def test_a_constant_is_its_value_and_a_parameter_its_number():
    module = entry("%p = f32[8]{0} parameter(0)", "%c = s32[] constant(118)", "%n = f32[] constant({...})")
    assert [each.arguments for each in module.entry.instructions] == ["0", "118", "{...}"]
    assert [each.operands for each in module.entry.instructions] == [(), (), ()]
    assert module.entry.parameters == {0: module.entry.instructions[0]}


def test_names_without_percent_signs():
    text = """HloModule m, is_scheduled=true

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(f32[] a, f32[] b)
}

ENTRY main.3 (p: f32[8,2]) -> f32[8,2] {
  p = f32[8,2]{1,0} parameter(0)
  z = f32[] constant(0)
  t = (f32[8,2]{1,0}, f32[]) tuple(p, /*index=1*/z)
  ROOT r.1-x = f32[8,2]{1,0} all-reduce(f32[8,2]{1,0} p), replica_groups={}, to_apply=add
}
"""
    module = hlo.parse(text)
    assert (module.entry.name, module.entry.root.name) == ("main.3", "r.1-x")
    assert module.entry.root.operands == ("p",)
    assert module.entry.by_name["t"].operands == ("p", "z")
    assert module.computations["add"].root.operands == ("a", "b")
    assert module.callers["add"] == [(module.entry, module.entry.root)]


def test_names_that_a_user_chose_are_no_attributes():
    scopes = r"jit(f)/say \"hi\", dimensions={7}, calls=%other/body=%more/stack_frame_id=9/gspmd[E_{data,model} -> E]"
    found = instruction(
        f'%g = f32[8]{{0}} all-gather(%p), metadata={{op_name="{scopes}" stack_frame_id=3}}, dimensions={{0}}, '
        'custom_call_target="a, dimensions={5}"'
    )
    assert found.attribute("dimensions") == "{0}"
    assert (found.called, found.frame) == ((), 3)
    assert found.op_name == scopes
    assert found.attribute("kind") == ""


def test_called_computations():
    called = {
        "condition=%c.1, body=%b.1": ("c.1", "b.1"),
        "kind=kLoop, calls=%fused_computation.2": ("fused_computation.2",),
        "branch_computations={%b0, %b1.2, %b2}": ("b0", "b1.2", "b2"),
        "true_computation=%yes, false_computation=%no": ("yes", "no"),
        "to_apply=add": ("add",),
        'custom_call_target="f", called_computations={%one}': ("one",),
    }
    for attributes, names in called.items():
        assert instruction(f"%a = f32[8]{{0}} while(%b), {attributes}").called == names


@pytest.mark.parametrize("written", ['"plain text"', "{not json", "[1,2]", ""])
def test_a_configuration_that_is_none(written):
    assert instruction(f"%a = f32[8]{{0}} fusion(%b), kind=kLoop, backend_config={written}").config == {}


def test_computations_of_other_threads():
    text = """HloModule m

%wrapped (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%q)
}, execution_thread="sparsecore"

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %s = ((f32[8]{0}), f32[8]{0}, s32[]) async-start(%p), async_execution_thread="sparsecore", calls=%wrapped
  ROOT %d = f32[8]{0} async-done(%s)
}
"""
    module = hlo.parse(text)
    assert set(module.computations) == {"wrapped", "main"}
    assert module.entry.by_name["s"].called == ("wrapped",)
    assert not module.is_scheduled


def test_the_header():
    header = "\n\nHloModule jit_f.3, is_scheduled=true, replica_count=2, num_partitions=4"
    module = entry("ROOT %p = f32[8]{0} parameter(0)", header=header)
    assert (module.name, module.is_scheduled, module.devices) == ("jit_f.3", True, 8)
    assert entry("ROOT %p = f32[8]{0} parameter(0)").devices == 1


def test_a_text_without_a_program():
    without_entry = "HloModule m\n\n%a (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}"
    for text in ("", "module @jit_f {\n}", without_entry):
        with pytest.raises(hlo.HloError) as error:
            hlo.parse(text)
        assert str(error.value) == (
            "this text holds no HLO module: it has no ENTRY computation.\n  Give compiled.as_text()."
        )


FRAMES = """HloModule m

FileNames
1 "/lib/gspmd/einsum.py"
2 "/home/me/my model.py"

FunctionNames
1 "einsum"
2 "<module>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=16 end_line=16 column=2 end_column=2}
2 {file_name_id=2 function_name_id=2 line=40 end_line=40 column=6 end_column=6}

StackFrames
1 {file_location_id=2 PARENT1}
2 {file_location_id=1 PARENT2}

ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0), metadata={op_name="p" stack_frame_id=2}
}
"""


@pytest.mark.parametrize(("first", "second"), [("", "parent_frame_id=1"), ("parent_frame_id=1", "parent_frame_id=2")])
def test_stack_frames_of_both_countings(first, second):
    # a root says no parent, or 1, of which one has to be taken away everywhere
    module = hlo.parse(FRAMES.replace(" PARENT1", f" {first}" if first else "").replace("PARENT2", second))
    assert [frame.line for frame in module.stack(module.entry.root)] == [16, 40]
    assert module.source(module.entry.root) == "/lib/gspmd/einsum.py:16"
    assert module.source(module.entry.root, ("/lib/gspmd",)) == "/home/me/my model.py:40"
    assert module.source(module.entry.root, ("/",)) == ""


def test_a_line_that_is_written_out():
    written = 'metadata={op_name="f" source_file="/lib/model.py" source_line=7 source_end_line=8}'
    module = entry(f"ROOT %p = f32[8]{{0}} negate(%q), {written}")
    assert module.source(module.entry.root) == "/lib/model.py:7"
    assert module.source(module.entry.root, ("/lib",)) == ""


def test_a_compiled_program_of_this_machine():
    def f(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=3)[0]

    module = hlo.parse(jax.jit(f).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile().as_text())
    assert (module.name, module.is_scheduled, module.devices) == ("jit_f", True, 1)
    named = {each for found in module.computations.values() for i in found.instructions for each in i.called}
    assert named <= set(module.computations)
    for computation in module.computations.values():
        assert {name for each in computation.instructions for name in each.operands} <= set(computation.by_name)
    dots = [i for found in module.computations.values() for i in found.instructions if i.opcode == "dot"]
    assert {module.source(dot).rpartition(":")[0] for dot in dots} == {__file__}
