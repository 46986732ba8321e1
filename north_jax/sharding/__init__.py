"""One model on many devices: a mesh, a table from logical axes to its axes, and what the model's code asks of them.

The model's functions look for a mesh in JAX's own context. Without one nothing of this happens.

>>> mesh = make_mesh(data=2, tensor=2, expert=2)
>>> model = north_jax.load(path, shardings=shardings_of(config, mesh))
>>> with jax.set_mesh(mesh):
...     logits = jax.jit(north_jax.forward, static_argnums=0)(config, model.params, tokens)
"""

from .activations import constrain as constrain
from .activations import on_shards as on_shards
from .exchanges import exchanges as exchanges
from .fused import fused_rows as fused_rows
from .mesh import AXES as AXES
from .mesh import current_mesh as current_mesh
from .mesh import make_mesh as make_mesh
from .pages import init_sharded_cache as init_sharded_cache
from .pages import joined_tables as joined_tables
from .pages import on_page_shards as on_page_shards
from .params import shardings_of as shardings_of
from .rules import RULES as RULES
from .rules import mesh_axes as mesh_axes
