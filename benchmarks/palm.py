from dataclasses import dataclass, field
import gspmd
from gspmd.audit import Report, compile_offline
from gspmd_models import ModelConfig
from gspmd_models.decoding import serving_program


@dataclass(frozen=True)
class File:
    """The table of a configuration file that counts here."""

    model: ModelConfig = field(default_factory=ModelConfig)


def compiled(config, layout, machine, mesh, phase, batch, room, length=1, weights=None, lowering="blocking") -> Report:
    """The program of a phase, compiled for a slice."""
    program = serving_program(config, layout, mesh, phase, batch=batch, room=room, length=length, weights=weights)
    with gspmd.lowering(lowering):
        return compile_offline(
            program.step, *program.arguments, topology=machine, mesh=mesh,
            donate_argnums=(program.donated,), auto_layout_argnums=(program.stored,),
        )  # fmt: skip
