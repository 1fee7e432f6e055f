"""Generate docs/layouts.md from the table of keys and the presets: `python -m gspmd.layouts.document`."""

from collections.abc import Iterator

from gspmd.annotate.errors import listed
from gspmd.layouts.read import preset_names, text_of
from gspmd.layouts.rules.keys import ALIKE, DIMENSIONS, KEYS, OVERRIDES, PARTS, PIPELINE, Key, of_part
from gspmd.layouts.rules.padding import PADDED
from gspmd.lowerings.in_force import LOWERINGS

_INTRODUCTION = """\
# Layouts

A layout is one TOML table that says where every tensor of a model lies. Change a string in it and the same model trains
to the same losses with other collectives. `gspmd.Layout.load` takes a preset's name or a file's path:

```python
import gspmd

layout = gspmd.Layout.load("megatron-1d").override({"ffn.residual": "B_xL_yzE", "attention.residual": "B_xL_yzE"})
layout.check({"B": 8, "L": 128, "E": 64, "H": 8, "F": 256}, {"x": 2, "y": 4})  # every fault at once, or none
layout["ffn.w_in"]  # 'EF_yz'; layout.ffn.w_in is the same
```

`print(layout)` shows the whole table. A file of one's own may begin with `base = "megatron-1d"` and hold only what
differs; a base that is a path, `base = "mine.toml"`, is looked for beside the file. The specs are written in the
notation of [notation.md](notation.md). This page is generated: `python -m gspmd.layouts.document > docs/layouts.md`.

## Dimensions
"""

_MESH = """
## The mesh

`[mesh]` declares the mesh axes a layout is written for, and how a number of devices is factored over them:

```toml
[mesh]
axes = ["x", "y", "z"]
factor = ["y", "x"]
```

The prime factors of the number of devices, largest first, are dealt out to the axes of `factor` in turn: 8 devices
become `y=4, x=2`, 12 become `y=6, x=2`; an axis that is not named there has size 1. A mesh that is given
(`--mesh x=4,y=2`) may leave out a declared axis, which then has size 1, and may have no other.

## A layout that is found

`gspmd train --layout auto` and `gspmd generate --layout auto` search the layout: exactly, for the model, sizes, remat
and dtype of the run, on the mesh of `--mesh`, or on every one of at most three axes that the devices make. One line
says how long that took, and the predicted seconds; it also says of which chip, for on devices that
`gspmd/hardware/chips.toml` does not list, such as those of a host, it is TPU v4. At most 90% of a chip's memory is
used. What was found is kept in `layouts/` of the cache folder (`$GSPMD_CACHE`, or ~/.cache/gspmd), and the same
question is not searched twice.

A run has its layout as `layout.toml` in its folder. `--resume` goes on with that one, and searches nothing; `--layout
RUN/layout.toml`, with the mesh that stands at the top of the file, begins another run in it; `--set` changes lines of
it after the search, and the prediction is without them. To generate, weights and cache lie as is best to decode, and a
section `[prefill]` has what is otherwise while prompts are read.

Training searches for whatever it trains, but for the stages of a pipeline, and with adapters for more than two mesh
axes; serving for whatever it serves, with weights and cache as `--weights` and `--cache` keep them. For a
model of one's own it is `gspmd search --model`, and then `--layout FILE`. Each refusal is one error, and a layout that
is given does what `auto` does not.

## Keys

*Parameters* come with a spec for their gradient and their optimizer state, which is the parameter's own unless
overridden. A *via* pins where the two operands of an equation meet, as `"BLE_x, E_xF_yz"`: it decides whether weights
or activations travel. Without it the planner takes the cheapest way. *Whole* dimensions may not be sharded, because the
code between einsums works on them locally. Where a key has a default, it may be left out.
"""

_AGREE = """
These have to be sharded alike, because no equation stands between them: {pairs}.

Key/value heads K lie over the mesh axes of the query heads H, over the first of these axes, or whole; in serving, where
attention moves both to the cache, anywhere. No device may have query heads of two groups in part. Their length L is
whole, or over the mesh axes of the queries' L: then keys go round a ring of these devices, and training brings tokens
and labels into zigzag order (see [attention.md](attention.md)). Token groups G take the place of the batch B, one for
each sequence unless the model says otherwise. Layers that are scanned share one spec; their stacked dimension N is
implicit, and whole unless `[pipeline]` splits it into stages along a mesh axis, over which nothing else may lie
([pipelines.md](pipelines.md)).

## Sections that override

Their keys are quoted keys of the parts above, as in `[optimizer]` `"ffn.w_in" = "E_xF_yz"`.

{overrides}

`[serving]` is `[prefill]` and `[decode]` at once; what a file says of one of them goes before.

The cache has one key, `"attention.key"`, with dimensions BTKD. `[lowering]` names the lowering of a part, or of
all of them as `default`: {lowerings}. It goes before the default of whoever calls.

## Microbatches and partial gradients

Where the batch is sharded over mesh axis x and a weight is not, the weight's gradient is a sum over x. A gradient that
[gradients] has as a partial sum, `"ffn.w_in" = "EF partialsum-x"`, is not settled where it arises: the loss takes the
weight as `EF reduced-x` ([notation.md](notation.md)), layers, microbatches and both uses of a tied table add to it,
and one move brings it to where [optimizer] has it. `zero-2` is such a layout: one reduce-scatter for each weight and
step takes the place of an all-reduce for each use.

Several microbatches (`training.microbatches`, `--microbatches 4`) split the batch on each device, and compute its parts
one after the other. The loss, its figures and the update are those of the whole batch. Of experts they differ where
groups of tokens span sequences: groups, their capacity and auxiliary losses are those of a microbatch; and every
microbatch has random draws of its own. With several of them every layout's gradients stay partial sums until the end of
the step, over all mesh axes that shard the batch, the length or the token groups and not the parameter; those of
parameters that are themselves gathered, as in `zero-3`, are reduced once for each microbatch, and so are those that
[gradients] has where the parameter is, `"ffn.w_in" = "EF"` beside `w_in = "EF"`. In a pipeline they
are partial over axes that split the batch and nothing else ([pipelines.md](pipelines.md#what-it-sends)).
`Layout.check` takes their number as M, `{{"B": 12, "M": 3}}`: what has to divide is the part of the batch that is
one of them, and no via may take such an axis off the rows that a gradient is summed over.

```python
import gspmd

layout = gspmd.Layout.load("megatron-1d").override({{"gradients.ffn.w_in": "EF_yz partialsum-x"}})
print(layout.for_loss()["ffn.w_in"], layout.for_loss()["ffn.w_out"], layout.for_loss(microbatches=4)["ffn.w_out"])
sizes, mesh = {{"B": 8, "L": 128, "E": 64, "F": 256}}, {{"x": 2, "y": 4, "z": 1}}
used = gspmd.plan("B_xLE, EF_yz reduced-x -> B_xLF_yz", sizes, mesh, dtype="float32")
settled = gspmd.plan("EF_yz partialsum-x -> E_xF_yz", sizes, mesh, dtype="float32")
print([step.kind for step in used.gradients[1].steps], [(step.kind, step.wire_bytes) for step in settled.steps])
```

```
EF_yz reduced-x F_yzE F_yzE reduced-x
['einsum'] [('reduce-scatter', 8192)]
```

A partial gradient is as large as its parameter on each device until it is settled. That is the price: of the three
ZeRO layouts only `zero-3`, which reduces what it gathered, never holds a whole gradient. What a device keeps from step
to step, with the gradients that the optimizer takes, in bytes for each float32 parameter over d devices:

| layout | parameters | gradients | optimizer | all |
| --- | --- | --- | --- | --- |
| `data-parallel` | 4 | 4 | 8 | 16 |
| `zero-1` | 4 | 4 | 8/d | 8 + 8/d |
| `zero-2` | 4 | 4/d | 8/d | 4 + 12/d |
| `zero-3` | 4/d | 4/d | 8/d | 16/d |

Partial sums are types, which Auto mesh axes do not have: there the step computes, and settles, its gradients under
Explicit axes of the same mesh.

## Alternatives by size

A key may hold a list of specs, of which sizes and mesh choose one: a small batch fills fewer mesh axes than a large
one, and the heads take the others.

```toml
[attention]
query = ["B_xyzLHD", "B_yzLH_xD", "B_zLH_yxD", "BLH_yzxD"]
key = ["B_xyzLKD", "B_yzLKD", "B_zLKD", "BLKD"]
```

The lists of a section have one length and are chosen together: the first place at which all of them divide. If none
does, the error says why not, place by place. `Layout.resolved` returns the layout with the specs that it chose, and
tells which; training, `gspmd compile`, `gspmd generate` and `rank` resolve what they are given, and to read a list
before is an error. Lists in `[prefill]` and `[decode]` are chosen in the layout of that phase, for the sizes of that
phase. Each section chooses for itself: `attention.residual` and `ffn.residual` have to agree in what the sizes choose,
and an alternative of one that agrees with none of the other's is an error for any sizes. On a command line `|` stands
between alternatives: `--set "ffn.hidden=B_xLF_yz|BLF_yz"`.

```python
import gspmd

decode = gspmd.Layout.load("weight-stationary-2d").phase("decode")
for batch in (64, 8, 1):
    print(*decode.resolved({{"B": batch, "H": 64, "K": 8}}, {{"x": 4, "y": 4, "z": 4}}).chosen)
```

```
[attention] 1 of 13: query B_xyzLHD, key B_xyzLKD
[attention] 5 of 13: query B_zLH_yxD, key B_zLK_yD
[attention] 9 of 13: query BLH_yzxD, key BLK_yD
```

## Padding

Where a size does not divide, `[padding]` rounds a dimension up to a multiple, in every tensor that has it:

```toml
[padding]
H = 64 # PaLM 540B has 48 heads, and serves on 64 chips
V = 128
```

Padding has no effect on any value or gradient. It begins at 0, and whatever it holds is masked:

{padded}

Without `[padding]` nothing is padded. `Layout.padded` gives the sizes that tensors have. Real entries begin with the
values that they have without padding. Where a dimension cannot be padded, `check` says why.

## Attention for serving

Attention to a cache stays where the cache is; queries, and the result, travel there and back. The cache lies as
`attention.key` of the decoding layout unless `[cache]` says otherwise, over batch, heads, length or any mix of them:

```python
import gspmd

layout = gspmd.Layout.load("weight-stationary-2d")
by_heads = layout.override({{"decode.attention.query": "BLH_yzxD", "decode.attention.key": "BLK_yzxD"}})
by_batch = layout.override({{"decode.attention.query": "B_zLH_yxD", "decode.attention.key": "B_zLKD"}})
by_length = by_heads.override({{"decode.attention.key": "BLKD", "cache.attention.key": "BT_yzxKD"}})
print([each.phase("decode").cache() for each in (by_heads, by_batch, by_length)])
```

```
['BTK_yzxD', 'B_zTKD', 'BT_yzxKD']
```

Heads suit few sequences with many key/value heads; the batch, over z, yz or xyz, suits many sequences with few of them
(Pope et al. 2022, section 3.3); the length suits contexts that one device cannot hold. The presets' own `[serving]`
goes from the batch over all axes to heads alone.

## Sections of one's own

A model with other parts gives them sections of their own, beside those above:

```toml
base = "megatron-1d"

[dimensions]
S = "state"

[ssm]
w_in = "ES_yz"
state = "B_xS_yzE"
in_via = "B_xLE, ES_yz"
```

The spec that a file first writes for a key declares the key's dimensions, in their order: `ssm.state` is BSE from then
on, and an override, or a file on top of this one, may shard it otherwise but not reorder it. A key that ends in `_via`
is two specs. Each letter is one of the table of dimensions, stands in `[dimensions]` with its meaning, or has a size
where the layout is checked. Every overriding section takes keys of one's own, and `[lowering]` the section's name.
Model code asks for `layout.ssm.state` or `layout["ssm.state"]`. What looks like a section above misspelt, as `[fnn]`
with a `w_in`, is an error. A file with sections of its own needs no base, and only the lines that its model has
([your-model.md](your-model.md)); one that is missing is named where the model asks for it.

## Equations in the names of lines

A section computes by the names of its lines, and those of other sections with theirs in front. The names become the
specs of `gspmd.einsum`, and operands meet where the layout says for the weight: `ffn.in_via` is for `w_in`, and for a
`w_gate` beside it.

```python
import gspmd

ffn = gspmd.Layout.load("weight-stationary-2d").ffn
print(ffn.equation("residual, (w_in, w_gate) -> (hidden, hidden)"))
print(ffn.via("residual, (w_in, w_gate) -> (hidden, hidden)"))
print(ffn.equation("hidden, w_out + attention.query, attention.w_o -> residual"))
```

```
BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)
BLE_x, (E_xF_yz, E_xF_yz)
BLF_yzx, F_yzE_x + B_xyzLHD, H_yzDE_x -> BLE_xyz
```

Under `jax.set_mesh`, `h, gate = ffn.einsum("residual, (w_in, w_gate) -> (hidden, hidden)", x, (w_in, w_gate))` is that
product; `ffn.move("residual -> attention.residual", x)` is a move, and nothing where both specs are one;
`ffn.rms_norm("residual, norm", x, scale)`, `ffn.layer_norm("residual, norm, norm_bias", x, scale, bias)` and
`ffn.add_bias("hidden, b_in", x, b)` are those of `gspmd.ops`. A via of a section of one's own is named in the call,
`via="in_via"`. The models here are written so: `models/feed_forward.py`, `models/attention.py`, `models/blocks.py`.

## Presets

In a preset a mesh axis that will be gathered stands minor (last), and one that is split off stands major (first), so
that no move needs a permute.
"""


def markdown() -> str:
    """Return the whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    yield "| letter | meaning |\n| --- | --- |"
    yield from (f"| {letter} | {meaning} |" for letter, meaning in DIMENSIONS.items())
    yield _MESH
    for part in (*PARTS, PIPELINE):
        yield f"### [{part}]\n\n| key | dimensions | kind | whole | default | meaning |\n{'| --- ' * 6}|"
        yield from map(_row, of_part(part))
        yield ""
    pairs = ", ".join(f"{listed(dims)} of `{first}` and `{second}`" for first, second, dims in ALIKE)
    overrides = "\n".join(f"- `[{section}]`: {meaning}" for section, meaning in OVERRIDES.items())
    padded = "\n".join(f"- {dim}: {how}." for dim, how in PADDED.items())
    yield _AGREE.format(pairs=pairs, overrides=overrides, lowerings=", ".join(LOWERINGS), padded=padded).lstrip()
    for name in preset_names():
        yield f"### {name}\n\n```toml\n{text_of(name).rstrip()}\n```\n"


def _row(key: Key) -> str:
    dims = key.dims if isinstance(key.dims, str) else ", ".join(str(KEYS[name].dims) for name in key.dims)
    free = "the planner's choice" if key.kind == "via" else "whole"
    default = f"`{key.default}`" if key.default else free if key.optional else "required"
    if key.default and key.kind != "via" and KEYS[key.default].dims != key.dims:
        default = f"{key.dims} of {default}"
    return f"| `{key.name}` | {dims} | {key.kind} | {', '.join(key.local)} | {default} | {key.meaning} |"


if __name__ == "__main__":
    print(markdown(), end="")
