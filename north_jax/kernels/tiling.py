"""Sizes of a grouped matmul's tiles, and which of them suits how many rows."""

from __future__ import annotations

import dataclasses

from .shared_memory import ROW_VALUES

WARPGROUP_ROWS = 64  # rows of one warpgroup's product, the least that Hopper's tensor cores take
DEPTH = ROW_VALUES  # columns of the operands that a step takes, or a multiple of it
SMEM_BYTES = 227 * 1024  # that a block may have on Hopper
_RESERVED_BYTES = 3 * 1024  # barriers, and what the compiler keeps for itself


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How a block of the grid divides its work.

    Attributes:
      row_warpgroups: consumer warpgroups, each of 64 rows of the tile.
      columns: rows of the weights that a tile covers, a multiple of 16 and at most 256.
      stages: steps of the pipeline in shared memory.
      align: groups begin at multiples of it, and rows are stored so many at once; 8, 16, 32 or 64.
      cluster: blocks that share a tile of rows, each with columns of its own: 1, or 2 with multicast loads.
      depth: columns of the operands that a step takes, a multiple of DEPTH. Memory is read in pieces of so many.
      least: rows of a tile that are loaded where no more count; 64 for always all.
    """

    row_warpgroups: int = 2
    columns: int = 256
    stages: int = 4
    align: int = 64
    cluster: int = 1
    depth: int = DEPTH
    least: int = WARPGROUP_ROWS

    def __post_init__(self) -> None:
        if self.row_warpgroups not in (1, 2):
            raise ValueError(f"row_warpgroups must be 1 or 2, got {self.row_warpgroups}")
        if self.columns % 16 or not 16 <= self.columns <= 256:
            raise ValueError(f"columns must be a multiple of 16 from 16 to 256, got {self.columns}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if self.align not in (8, 16, 32, 64):
            raise ValueError(f"align must be 8, 16, 32 or 64, got {self.align}")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster must be 1 or 2, got {self.cluster}")
        if self.depth % DEPTH or self.depth < DEPTH:
            raise ValueError(f"depth must be a multiple of {DEPTH}, got {self.depth}")
        if self.least not in (8, 16, 32, 64) or (
            self.least < WARPGROUP_ROWS and self.row_warpgroups * self.cluster > 1
        ):
            raise ValueError(f"least must be 8, 16, 32 or 64, and 64 for more than one warpgroup, got {self.least}")

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.row_warpgroups * WARPGROUP_ROWS

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage for 16-bit operands."""
        return 2 * self.depth * (self.rows + self.columns)

    def fits(self, staging_bytes: int) -> bool:
        """Whether stages and `staging_bytes` for the results fit into a block's shared memory."""
        return self.stages * self.stage_bytes + staging_bytes + _RESERVED_BYTES <= SMEM_BYTES
