"""Small models, of which a test changes the settings that it is about: `replace(TINY, kv_heads=4)`."""

from gspmd_models import ModelConfig

TINY = ModelConfig(vocabulary=64, embed=32, layers=2, heads=8, kv_heads=8, head_size=8, feed_forward=64)
"""One to run on eight devices of the CPU: divisible by 8 wherever a preset divides."""
WIDE = ModelConfig(
    vocabulary=2048, embed=1024, layers=2, heads=16, kv_heads=4, head_size=64, feed_forward=2048, tied=False
)
"""One that is planned and never run: wide enough that products and moves take noticeable seconds."""
