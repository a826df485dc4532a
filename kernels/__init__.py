"""Host-side optimizer arithmetic: fused AdamW, square norms, and the plain reference the tests compare with."""

from lazytrain.kernels.adamw import adamw_step
from lazytrain.kernels.norms import clip_coefficient, square_norm

__all__ = ["adamw_step", "clip_coefficient", "square_norm"]
