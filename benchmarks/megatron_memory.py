"""Bytes per device of the models of Korthikanti et al. 2022, as planned and by the paper's formulas."""

import math
from dataclasses import dataclass, replace

from gspmd.audit import topology
from gspmd.layouts import Layout
from gspmd_models import ModelConfig
from gspmd_models.parameters import optimizer_specs, parameter_specs
from gspmd_models.remat.prediction import predicted


@dataclass(frozen=True)
class Megatron:
    """A model of Korthikanti et al. 2022, table 3, with t-way tensor and p-way pipeline parallelism."""

    layers: int
    hidden: int
    heads: int
    tensor: int
    stages: int
    microbatches: int

    @property
    def config(self) -> ModelConfig:
        """The model, with all of its biases."""
        return ModelConfig(
            vocabulary=VOCABULARY, embed=self.hidden, layers=self.layers, heads=self.heads, kv_heads=self.heads,
            head_size=self.hidden // self.heads, feed_forward=4 * self.hidden, activation="gelu", norm="layer",
            norm_bias=True, qkv_bias=True, out_bias=True, ffn_bias=True,
        )  # fmt: skip


MEGATRON = {
    "175B": Megatron(96, 12_288, 96, 8, 8, 64),
    "530B": Megatron(105, 20_480, 128, 8, 35, 280),
    "1T": Megatron(128, 25_600, 160, 8, 64, 512),
}
LENGTH, VOCABULARY = 2048, 51_200
RESIDUAL = dict.fromkeys(("attention.residual", "ffn.residual"), "B_xL_yzE")


def formulas(model: Megatron) -> tuple[float, float]:
    """Return two numbers of bytes per device by the paper's formulas.

    The first is for parameters, gradients and moments, the second for a layer's activations under `selective`.

    The first number is 16 · (12 L h² (1 + 13/12h) / (t p) + V h / t). It holds for float32, as here, and for float16
    with float32 masters, as in the paper. The embedding table is on every stage, as here. The second number is (34 − 2)
    s b h / t, which leaves out the masks of dropout.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), sections 4 and 5; Narayanan et al. 2021 (arXiv 2104.04473),
    section 5.1 for the number of parameters.
    """
    each = 12 * model.layers * model.hidden**2 * (1 + 13 / (12 * model.hidden)) / model.stages
    return 16 * (each + VOCABULARY * model.hidden) / model.tensor, 32 * LENGTH * model.hidden / model.tensor


def planned_bytes(model: Megatron) -> dict[str, int]:
    """Return the planned bytes per device of parameters, gradients and moments in float32, and of a layer's tensors."""
    config, shape = model.config, {"p": model.stages, "x": 1, "y": model.tensor, "z": 1}
    stages = Layout.load("pipeline").override(RESIDUAL)
    kept, held = optimizer_specs(config, stages), 0
    # 4 bytes for a parameter and 4 for its gradient, placed alike; 4 for each of two moments, with their own spec.
    for path, (spec, whole) in parameter_specs(config, stages).items():
        held += 8 * math.prod(spec.local_shape(whole, shape)) + 8 * math.prod(kept[path].local_shape(whole, shape))
    mesh = topology(f"tpu-v5p:2x2x{model.tensor // 4}").mesh({"x": 1, "y": model.tensor, "z": 1})
    rows = predicted(replace(config, layers=2), Layout.load("megatron-sequence"), mesh, 1, LENGTH, "bfloat16")
    return {"state": held} | {row.remat: row.layer_bytes for row in rows}
