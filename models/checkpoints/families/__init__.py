"""Tables of the families of public models whose checkpoints can be read and written."""

from .encoder_decoders import M2M_100, NLLB_MOE, SWITCH, T5
from .family import Agreement, Family, Option, Stored
from .mixtures import DOTS, GLM4_MOE, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from .parallel import COHERE, GPTJ, PHI
from .serial import GEMMA, LLAMA, MISTRAL, QWEN2, QWEN3

#: In the order in which saving tries them.
FAMILIES = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    GLM4_MOE,
    DOTS,
    GPTJ,
    PHI,
    COHERE,
    M2M_100,
    NLLB_MOE,
    T5,
    SWITCH,
)

__all__ = ["FAMILIES", "Agreement", "Family", "Option", "Stored"]
