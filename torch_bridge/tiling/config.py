"""What the tilings of all families have in common: how the programs of a launch divide a problem.

A family of time loops has a frozen dataclass beside its costs. The fields are the numbers in which its tilings differ;
a number that is the same for all of them, or follows from a field, is an attribute of the class or a property.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from torch_bridge.tiling.arithmetic import cdiv
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem

# The families of time loops in `torch_bridge.kernels.loops`. "streamed" is written in Triton, the others in Gluon.
# "resident", "fma" and "split_registers" run on compute capability 8.0 and newer; "split" and "rows" use wgmma, which
# only capability 9.0 has.
Loop = Literal["streamed", "resident", "fma", "split", "split_registers", "rows"]
# `(name, length, dtype, zeroed)` of an array through which programs that share a tile exchange data. An array that is
# `zeroed` must contain zeros when the launch starts.
Workspace = tuple[str, int, str, bool]

# Fewest steps of the chunks of time that pieces begin in: a program loads its weights before the first step.
MIN_STEPS_OF_CHUNK = 8


class Tiling:
    """A tiling of any family.

    A program has `block_h` units of `block_b` sequences, and sums products over `block_k` units at a time. `splits`
    programs share the units of a tile.

    Attributes:
      loop: the family.
      prepares_weights: whether the kernels round the weights that they load; the others take rounded ones.
      in_float32: whether the kernels multiply in full float32 where TF32 is allowed, too.
      shared_gates: number of gates whose weights are in shared memory instead of registers.
      pieces: number of pieces of a sequence that may run side by side, if resets cut it.
      cluster: 1, or `splits`: the programs that share the units are then a cluster, and exchange data through one
        another's shared memory instead of L2.
    """

    loop: ClassVar[Loop]
    prepares_weights: ClassVar[bool] = True
    in_float32: ClassVar[bool] = False
    shared_gates = 0
    pieces = 1
    cluster = 1

    block_b: int
    splits: int

    def _asdict(self) -> dict[str, int]:
        """Returns all numbers by name, also those that are no fields; explanations list them like a named tuple's."""
        names = (
            "block_h", "block_b", "block_k", "splits", "num_warps", "num_stages", "shared_gates", "pieces", "cluster",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def room(self, device: Device) -> int:
        """Returns the number of tiles that run at once, if programs are alone on their SMs."""
        return device.multiprocessors // self.splits

    def fewest_steps(self, problem: Problem) -> int:
        """Returns the number of steps from which on sequences may be cut into pieces."""
        return 0

    def fewest_pieces(self, problem: Problem, device: Device) -> int:
        """Returns the fewest pieces of a sequence that are worth running side by side; 0 if the kernels cannot."""
        return 0

    def in_pieces(self, problem: Problem, device: Device) -> Self:
        """Returns the tiling with as many pieces of each sequence as can run at once, beside all other sequences.

        Episodes decide how many there are. A program whose pieces do not exist ends at once, or in `split_registers`
        after it has loaded its weights.
        """
        fewest = self.fewest_pieces(problem, device)
        if not fewest or problem.steps < self.fewest_steps(problem) or "reset" not in dict(problem.dtypes):
            return self
        room = self.room(device) // problem.models * self.block_b
        pieces = min(room // problem.sequences, problem.steps // MIN_STEPS_OF_CHUNK)
        return replace(self, pieces=pieces) if pieces >= fewest else self  # type: ignore[type-var]

    def tiles(self, problem: Problem) -> int:
        """Returns the number of batch tiles per model."""
        return cdiv(problem.sequences * self.pieces, self.block_b)

    def workers(self, problem: Problem, device: Device) -> int:
        """Returns the number of workers: groups of `splits` programs that process their tiles one after the other."""
        return problem.models * self.tiles(problem)

    def rounds(self, problem: Problem, device: Device) -> int:
        """Returns the largest number of tiles that one worker processes."""
        return cdiv(problem.models * self.tiles(problem), self.workers(problem, device))

    def workspaces(self, problem: Problem, device: Device) -> list[Workspace]:
        """Returns the arrays through which programs that share a tile exchange data."""
        return []

    def shared_memory(self, problem: Problem) -> int:
        """Returns an upper bound, in bytes, on a program's shared memory: close to measured use, checked by a test."""
        raise NotImplementedError


class OneProgram(Tiling):
    """A tiling whose programs keep the weights of all units on chip."""

    block_h: int
    splits = 1
    num_stages = 1

    def fewest_steps(self, problem: Problem) -> int:
        """Returns 128.

        On an H200, 128 steps of 16 sequences of a GRU of 128 units take 57.9 us forward and 77.7 us backward. With the
        kernels that find pieces, they take 0.2 us more and 0.1 us less without a reset, and 23.3 and 29.2 us with
        episodes of 25 steps. Of 64 units, they take 1.1 us more without a reset, in a pass of 113 us.
        """
        return 128

    @property
    def block_k(self) -> int:
        """All units: no product is divided."""
        return self.block_h


class SharedUnits(Tiling):
    """A tiling whose programs share the units, and wait for one another at every step."""

    def workers(self, problem: Problem, device: Device) -> int:
        """Returns the number of workers of which all programs run at once, at most one a tile."""
        return max(1, min(problem.models * self.tiles(problem), self.room(device)))


class ExchangesWords(SharedUnits):
    """A tiling of the "split" or "split_registers" kernels, whose programs send words to one another."""

    block_h: int
    num_stages = 1

    def workspaces(self, problem: Problem, device: Device) -> list[Workspace]:
        """Returns two buffers of words, and the sums of a norm.

        Forward, each pair of elements is a word and the word's number. Backward, each program sends a word per element
        to each program. A cluster needs none.
        """
        if self.cluster > 1:
            return []
        forward = problem.direction == "fwd"
        words = 2 * self.block_h * self.block_b * self.splits * self.workers(problem, device)
        found = [("exchange", words if forward else words * self.splits, "int32", True)]
        if problem.norm_width and not forward:  # each program sends a sum per sequence, which is for all programs
            found.append(("sums", words // self.block_h, "int32", True))
        return found
