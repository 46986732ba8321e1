"""Mixtures of experts: the router, and the ways to run the experts, all equal.

`run_experts` chooses among those in pure JAX; `warp_decode` has kernels for few tokens, and weights in eight bits.
`expert_centric` is what it is compared with.
"""

from .expert_centric import expert_centric as expert_centric
from .layer import TILE as TILE
from .layer import Method as Method
from .layer import expert_weights as expert_weights
from .layer import gathered_down as gathered_down
from .layer import gathered_hidden as gathered_hidden
from .layer import moe as moe
from .layer import route as route
from .layer import route_logits as route_logits
from .layer import run_experts as run_experts
from .layer import select_experts as select_experts
from .operation import MAX_TOKENS as MAX_TOKENS
from .operation import Form as Form
from .quantized import SCHEMES as SCHEMES
from .quantized import Experts as Experts
from .quantized import QuantizedExperts as QuantizedExperts
from .quantized import Scheme as Scheme
from .quantized import dequantize as dequantize
from .quantized import quantize as quantize
from .reference import down_reference as down_reference
from .reference import gate_up_reference as gate_up_reference
from .sharded import sharded_warp_decode as sharded_warp_decode
from .warp import MAX_TOP_K as MAX_TOP_K
from .warp import NO_EXPERT as NO_EXPERT
from .warp import SIZE_STEP as SIZE_STEP
from .warp import moe_down as moe_down
from .warp import moe_gate_up as moe_gate_up
from .warp import warp_decode as warp_decode
