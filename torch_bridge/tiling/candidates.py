"""The tilings that can run a problem, the one that is chosen, and the dtypes of its residuals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from torch_bridge import rules
from torch_bridge.cells import CELLS
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.fma import MAX_PER_SM_IN_TF32, Fma, fma_configs
from torch_bridge.tiling.problem import Problem, UnsupportedError, product_kind
from torch_bridge.tiling.resident import Resident, resident_configs
from torch_bridge.tiling.rows import Rows, rows_configs
from torch_bridge.tiling.split import Split, split_configs
from torch_bridge.tiling.split_registers import SplitRegisters, split_registers_configs
from torch_bridge.tiling.streamed import SharedStreamed, Streamed, max_hidden, shared_configs, single_program_configs
from torch_bridge.tiling.support import FLOAT32_WIDTH

KernelConfig = Streamed | SharedStreamed | Resident | Fma | Split | SplitRegisters | Rows


@functools.lru_cache(maxsize=4096)
def heuristic(problem: Problem, device: Device) -> KernelConfig:
    """Returns the tiling for a problem.

    Raises:
      UnsupportedError: the hidden state is wider than the programs of one cooperative launch can share.
    """
    return candidates(problem, device)[0]


def candidates(problem: Problem, device: Device) -> list[KernelConfig]:
    """Returns the tilings that can run a problem, the fastest first by the estimates of each family's module.

    Raises:
      UnsupportedError: see `heuristic`.
    """
    loops = set(CELLS[problem.cell].loops)
    if problem.tangent:
        loops &= {"streamed", "resident", "fma"}
    if "total_dh" in dict(problem.dtypes):
        loops -= {"split", "rows"}
    few = fma_configs(problem, device) if "fma" in loops else []
    resident = resident_configs(problem, device) if "resident" in loops else []
    split = split_configs(problem, device) if "split" in loops else []
    rows = rows_configs(problem, device) if "rows" in loops else []
    registers = split_registers_configs(problem, device) if "split_registers" in loops else []
    shared = shared_configs(problem, device)
    # Keeping the weights on chip is faster than reading them at every step, by more than the error of the estimates.
    # Kernels that run few sequences at once are an exception if there are many sequences.
    fast, slow = registers, []
    if registers and shared:
        most = min(shared, key=lambda way: way[0])[1].estimated_us(problem, device)
        fast = [way for way in registers if way[1].estimated_us(problem, device) <= most]
        slow = [way for way in registers if way not in fast]
    configs = [
        *(config for cost, config in few if not cost),
        *resident,
        *single_program_configs(problem, device),
        *_by_cost([*split, *rows, *fast]),
        *_by_cost([*shared, *(way for way in few if way[0])]),
        *_by_cost(slow),
    ]
    if not configs:
        raise UnsupportedError(
            f"a hidden width of {problem.hidden} is more than the {device.multiprocessors} SMs of this device "
            f'can share (at most {max_hidden(device)}); pass implementation="xla"'
        )
    # and in clusters, of which the costs above know nothing
    return [config.in_pieces(problem, device) for config in configs]


def _by_cost(ways: Sequence[tuple[float, KernelConfig]]) -> list[KernelConfig]:
    return [config for _, config in sorted(ways, key=lambda way: way[0])]


def may_have_float32_residuals(hidden: int, sequences: int, device: Device) -> bool:
    """Whether the forward kernel may save float32 residuals where TF32 is allowed; see `with_residual_dtypes`."""
    few = sequences <= MAX_PER_SM_IN_TF32 * device.multiprocessors
    return few and hidden <= FLOAT32_WIDTH and device.capability >= rules.LOWEST_CAPABILITY


def with_residual_dtypes(problem: Problem, device: Device) -> Problem:
    """Returns `problem`, whose residuals are declared float32, with the dtypes in which its kernel saves them.

    Kernels with TF32 products save all but `carry_gate` as float16, because TF32 rounds no finer. Kernels that multiply
    in full float32 save what is declared.
    """
    dtypes = dict(problem.dtypes)
    has_arrays = "local_grads" in dtypes and not problem.has_packed_residuals  # residuals are not stored as words
    if product_kind(problem) != "tf32" or not has_arrays or heuristic(problem, device).in_float32:
        return problem
    saved = [name for name, _ in CELLS[problem.cell].residuals if name in dtypes]
    dtypes |= {name: "float16" for name in saved if rules.residual_fits_float16(name, "float32", "tf32")}
    return dataclasses.replace(problem, dtypes=tuple(dtypes.items()))
