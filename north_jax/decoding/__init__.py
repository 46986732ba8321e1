"""Decoding in quanta of several steps, in pure JAX or by the megakernel, behind one interface: `Decoder`."""

from .backends import Backend as Backend
from .backends import Choice as Choice
from .backends import choose_backend as choose_backend
from .backends import make_decoder as make_decoder
from .history_counts import HistoryCounts as HistoryCounts
from .slot_sampler import Draw as Draw
from .slot_sampler import Drawn as Drawn
from .slot_sampler import SlotSampler as SlotSampler
from .slot_sampler import check_draws as check_draws
from .slot_sampler import draw_of as draw_of
from .types import BackendError as BackendError
from .types import Decoder as Decoder
from .types import DecodeRow as DecodeRow
from .types import Deliver as Deliver
from .types import Finish as Finish
from .types import Grammar as Grammar
from .types import TokenHistory as TokenHistory
from .types import TokenRecord as TokenRecord
from .types import finish_of as finish_of
