"""Tables of the families of public models whose checkpoints can be read and written."""

from .encoder_decoders import M2M_100, NLLB_MOE, SWITCH, T5
from .family import Agreement, Family, Option, Stored
from .layer_norms import FALCON, GPT_NEOX, STABLELM, STARCODER2
from .mixtures import GRANITE_MOE, MIXTRAL, QWEN3_MOE
from .parallel import COHERE, GPTJ, PHI
from .serial import GEMMA, GRANITE, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3

#: In the order in which saving tries them.
FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, PHI3, GRANITE),
    *(MIXTRAL, QWEN3_MOE, GRANITE_MOE),
    *(GPTJ, PHI, COHERE, STARCODER2, STABLELM, GPT_NEOX, FALCON),
    *(M2M_100, NLLB_MOE, T5, SWITCH),
)

__all__ = ["FAMILIES", "Agreement", "Family", "Option", "Stored"]
