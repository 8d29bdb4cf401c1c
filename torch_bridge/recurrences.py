"""The launch of a time loop: a cell's forward or backward kernel with its tiling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_bridge import compiler, kernels, launch, tiling
from torch_bridge.cells import CELLS
from torch_bridge.tiling import Device, KernelConfig, Problem


class Launch(launch.Launch):
    """A problem with its tiling.

    Attributes:
      problem: the recurrence.
      config: its tiling.
    """

    def __init__(self, problem: Problem, device: Device, config: KernelConfig | None = None):
        super().__init__(device)
        self.problem = problem
        self.config = config or tiling.heuristic(problem, device)
        tiles, workers = self.config.tiles(problem), self.config.workers(problem, device)
        self.workspaces = self.config.workspaces(problem, device)
        dtypes = dict(problem.dtypes) | {name: dtype for name, _, dtype, _ in self.workspaces}
        constants = {
            "H": problem.hidden, "BLOCK_H": self.config.block_h, "BLOCK_B": self.config.block_b,
            "BLOCK_K": self.config.block_k, "SPLITS": self.config.splits, "STAGES": self.config.num_stages,
            "SHARED_GATES": self.config.shared_gates, "RESET_STATE": tiling.RESET_STATES.index(problem.reset_state),
            "REVERSE": problem.reverse, "PRECISION": problem.precision, "GATES_PHASE": True, "PRODUCT_PHASE": True,
        }  # fmt: skip
        pieces = self.config.pieces
        cell, functions = CELLS[problem.cell], kernels.CELLS[problem.cell]
        constants |= {
            "STEP": functions.tangent_step if problem.tangent else functions.step,
            "RESIDUALS": None if problem.tangent else functions.residuals, "GRAD_STEP": functions.grad_step,
            "GATES": cell.gates, "SEPARATE": cell.last_gate_separate, "FACTORS": len(cell.residuals) - 1,
            "PACKED": problem.has_packed_residuals, "NORM_WIDTH": problem.norm_width,
        } | ({} if pieces > 1 else {"pieces": None})  # fmt: skip
        scalars = {
            "T": problem.steps, "B": problem.batch, "Q": problem.sequences, "tiles": tiles,
            "items": problem.models * tiles, "t_begin": 0, "t_end": problem.steps,
        } | ({"pieces": pieces} if pieces > 1 else {})  # fmt: skip
        self.add(
            kernels.loop_kernel(self.config.loop, problem.direction), workers * self.config.splits,
            self.config.num_warps, dtypes, constants, scalars, num_stages=self.config.num_stages,
            launch_cooperative_grid=self.config.splits > self.config.cluster and not device.interpreted,
            cluster=self.config.cluster,
        )  # fmt: skip

    def interpret(self, tensors: Mapping[str, Any]) -> None:
        """Runs the kernel in Triton's interpreter, on CPU tensors given by name.

        The interpreter runs programs one after the other, so programs that wait for one another cannot run in one
        launch. Such programs are launched once per step (and phase), so that the end of a launch is their barrier.
        """
        if self.config.splits == 1:
            super().interpret(tensors)
            return
        forward = self.problem.direction == "fwd"
        phases = [{}] if forward else [{"PRODUCT_PHASE": False}, {"GATES_PHASE": False}]
        with compiler.interpreter_lock:
            # the forward pass begins with a launch of zero steps, which writes the operands that the first step reads
            for t in range(-1 if forward else 0, self.problem.steps):
                for phase in phases:
                    self._interpret(self.kernels[0], tensors, **phase, t_begin=max(t, 0), t_end=t + 1)
