"""Numerics: every backend beside JAX in float32, tensor by tensor. `python -m north_jax.compare` does it all."""

from .backends import LABELS as LABELS
from .backends import Subject as Subject
from .backends import exact_pass as exact_pass
from .backends import subjects as subjects
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .comparison import difference as difference
from .heat_map import heat_map as heat_map
from .measures import Difference as Difference
from .passes import TENSORS as TENSORS
from .passes import Pass as Pass
from .passes import jax_pass as jax_pass
from .tables import tables as tables
