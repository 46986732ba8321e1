"""Checkpoints: read, write, save and restore the parameters of a model."""

from .errors import CheckpointError
from .huggingface_writer import export
from .loader import Checkpoint, load
from .orbax import restore, save
from .random import write_random_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "export", "load", "restore", "save", "write_random_checkpoint"]
