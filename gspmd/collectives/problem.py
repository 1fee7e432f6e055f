"""What a search is asked: a setting, the tensors as they are held, and the products they take part in."""

from dataclasses import dataclass
from functools import cached_property

from gspmd.annotate.spec import Spec
from gspmd.collectives.chips import Chip
from gspmd.collectives.cost import itemsize


@dataclass(frozen=True)
class Setting:
    """What a search happens in: the sizes, the mesh without axes of size 1, and the chip."""

    sizes: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    chip: Chip


@dataclass(frozen=True)
class Tensor:
    """A tensor as it is held: its spec, its dtype, its dtype on the wire, and its name in plans and messages."""

    spec: Spec
    dtype: str
    wire: str
    name: str = ""

    @cached_property
    def itemsize(self) -> int:
        """Bytes per element on the wire."""
        return itemsize(self.wire)


@dataclass(frozen=True)
class Member:
    """One product of the shared tensor: its partner (None: the shared tensor alone), what it becomes, and any pins."""

    partner: Tensor | None
    target: Tensor
    pinned: Spec | None = None


def wider(shared: Tensor, member: Member) -> str:
    """The dtype whose speed a product has: that of the operand with more bytes."""
    if member.partner is None:
        return shared.dtype
    return max(shared.dtype, member.partner.dtype, key=itemsize)
