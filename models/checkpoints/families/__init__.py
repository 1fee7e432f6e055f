"""Tables of the families of public models whose checkpoints can be read and written."""

from .alibi import BLOOM, MPT
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .encoder_decoders import M2M_100, NLLB_MOE, SWITCH, T5
from .family import Agreement, Family, Option, Stored
from .gemma import GEMMA, GEMMA_2, GEMMA_3, GEMMA_3_IMAGES
from .glm import GLM, GLM_4
from .gpt import GPT_2, GPT_OSS
from .layer_norms import FALCON, GPT_NEOX, STABLELM, STARCODER2
from .llama4 import LLAMA_4, LLAMA_4_IMAGES
from .mixtures import DOTS, GLM4_MOE, GRANITE_MOE, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from .olmo import OLMO_2, OLMO_3, OLMOE
from .parallel import COHERE, GPTJ, PHI
from .serial import GRANITE, LLAMA, LLAVA, MINISTRAL, MISTRAL, MISTRAL_3, PHI3, QWEN2, QWEN3
from .unrotated import COHERE_2, SMOLLM_3

#: All families, in the order in which saving tries them.
FAMILIES = (
    *(
        LLAMA,
        MISTRAL,
        MINISTRAL,
        QWEN2,
        QWEN3,
        GEMMA,
        GEMMA_2,
        GEMMA_3,
        OLMO_2,
        OLMO_3,
        SMOLLM_3,
        PHI3,
        GRANITE,
        GLM,
        GLM_4,
    ),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, DOTS),
    LLAMA_4,
    *(GPT_2, GPTJ, PHI, COHERE, COHERE_2, STARCODER2, STABLELM, GPT_NEOX, FALCON, BLOOM, MPT),
    *(M2M_100, NLLB_MOE, T5, SWITCH),
    *(GEMMA_3_IMAGES, LLAMA_4_IMAGES, MISTRAL_3, LLAVA),
)

__all__ = ["FAMILIES", "Agreement", "Family", "Option", "Stored"]
