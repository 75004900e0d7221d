"""The MLX engine: the only package that imports mlx and mlx_lm.

Importing this package loads neither; its modules do, and fail as ImportError where they are not installed.
"""

import os

# mlx_lm loads transformers, which otherwise warns at import that PyTorch is missing; nothing here needs it.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
