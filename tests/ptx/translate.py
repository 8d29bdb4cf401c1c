"""Translates the basic blocks of a kernel to Python functions.

A function `f(program, R, m)` runs a basic block for the threads of the mask `m`, None for all, on the registers R. It
returns `(target, taken, other)`: the threads of the mask `taken` (None: all) go on at the basic block `target`, the
others at `other`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx import arithmetic, warp_operations
from ptx.parse import PTXError, split_operands
from ptx.registers import DTYPES, SIZES, UNSIGNED, is_integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ptx.parse import Instruction, ParsedKernel

# The formulas of instructions, by their names without the type. `{0}` is the first source.
OF_INTEGERS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul.lo": "{0} * {1}", "mad.lo": "{0} * {1} + {2}", "neg": "-{0}",
    "div": "divide({0}, {1})", "rem": "np.fmod({0}, {1})", "and": "{0} & {1}", "or": "{0} | {1}",
    "xor": "{0} ^ {1}", "not": "~{0}",
    "min": "np.minimum({0}, {1})", "max": "np.maximum({0}, {1})", "selp": "np.where({2}, {0}, {1})",
    "shl": "shift_left({0}, {1})", "shr": "shift_right({0}, {1})", "mov": "{0}",
}  # fmt: skip
OF_FLOATS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div.full": "{0} / {1}", "div.approx": "{0} / {1}",
    "neg": "-{0}",
    "abs": "np.abs({0})", "fma.rn": "fused_multiply_add({0}, {1}, {2})", "max": "np.fmax({0}, {1})",
    "max.NaN": "np.maximum({0}, {1})", "ex2.approx": "np.exp2({0})",
    "ex2.approx.ftz": "np.exp2({0})", "rcp.approx.ftz": "np.float32(1) / {0}", "sqrt.approx.ftz": "np.sqrt({0})",
    "selp": "np.where({2}, {0}, {1})",
}  # fmt: skip
OF_PREDICATES = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "mov": "{0}"}
OF_32_BITS = {
    "bfe.u32": "extract_bits({0}, {1}, {2})", "bfe.s32": "extract_bits({0}, {1}, {2})",
    "shf.l.wrap.b32": "funnel_shift_left({0}, {1}, {2})", "prmt.b32": "permute_bytes({0}, {1}, {2})",
    "mul.hi.u32": "(({0}.astype('u8') * {1}) >> np.uint64(32)).astype('u4')",
}  # fmt: skip
# The types of sources that are not those of the instruction, by opcode and position.
SOURCE_TYPES = {("shl", 1): "u32", ("shr", 1): "u32", ("bfe", 1): "u32", ("bfe", 2): "u32", ("selp", 2): "pred"}
COMPARISONS = {"eq": "{0} == {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}"}
OF_INTEGER_PAIRS = COMPARISONS | {"ne": "{0} != {1}"}
# A NaN is unequal to everything only in `neu`.
OF_FLOAT_PAIRS = COMPARISONS | {"ne": "({0} < {1}) | ({0} > {1})", "num": "({0} == {0}) & ({1} == {1})"}
CONVERSIONS = {
    "cvt.f32.f16": "{0}.astype('f4')", "cvt.f32.bf16": "from_bfloat16({0})", "cvt.rn.f16.f32": "{0}.astype('f2')",
    "cvt.rn.bf16.f32": "round_to_bfloat16({0})", "cvt.rna.tf32.f32": "round_to_tf32({0})",
}  # fmt: skip
# Conversions of two sources, of which the second is in the low half.
PAIR_CONVERSIONS = {
    "cvt.rn.f16x2.f32": "pack([round_to_float16({1}), round_to_float16({0})], 'u4')",
    "cvt.rn.satfinite.f16x2.f32": "pack([round_to_float16({1}, True), round_to_float16({0}, True)], 'u4')",
    "cvt.rn.bf16x2.f32": "pack([round_to_bfloat16({1}), round_to_bfloat16({0})], 'u4')",
}
ACCESSES = (
    {"global"}, {"global", "cg"}, {"global", "gpu", "acquire"}, {"global", "gpu", "relaxed"}, {"shared"},
    {"shared", "cluster", "relaxed"}, {"shared::cluster", "cluster", "relaxed"},
)  # fmt: skip
SPECIAL_REGISTERS = ("%tid.x", "%ctaid.x", "%nctaid.x")
BARRIER = ("bar", "sync")
CLUSTER_BARRIER = ("barrier", "cluster", "wait", "aligned")  # follows an arrival, which is part of it here


@dataclasses.dataclass(frozen=True)
class BasicBlock:
    """A translated basic block.

    Attributes:
      run: the function; see the top of this file.
      lines: the PTX line of each line of the function after the first one.
    """

    run: Callable[..., tuple[int, Any, int]]
    lines: list[int]


class Translator:
    """Translates the basic blocks of a kernel when they are first run.

    Attributes:
      kernel: what is translated.
      end: the number of the basic block that threads go on at when they return.
      barriers: the PTX line of the barrier of a program that ends a basic block, for those that one ends.
      cluster_barriers: the same for the barriers of a cluster.
    """

    def __init__(self, kernel: ParsedKernel) -> None:
        self.kernel = kernel
        self._names: dict[str, Any] = {**vars(arithmetic), **vars(warp_operations), "restrict": _restrict}
        self._constants: dict[tuple[str, bytes], str] = {}
        self._translated: dict[tuple[int, bool], BasicBlock] = {}
        code = kernel.instructions
        starts = {0, len(code)}
        for i, one in enumerate(code):
            if one.parts[0] == "bra":
                starts.add(one.scope.label(one.operands[0]))
            if one.parts[0] in ("bra", "ret") or one.parts in (BARRIER, CLUSTER_BARRIER):
                starts.add(i + 1)
        self._starts = sorted(starts)
        self._block_at = {start: block for block, start in enumerate(self._starts)}
        self.end = self._block_at[len(code)]
        self.barriers, self.cluster_barriers = (
            {self._block_at[i + 1] - 1: one.line for i, one in enumerate(code) if one.parts == parts}
            for parts in (BARRIER, CLUSTER_BARRIER)
        )

    def block(self, number: int, masked: bool) -> BasicBlock:
        """Returns a basic block, for a mask or for all threads."""
        if (number, masked) not in self._translated:
            source, lines = ["def run(program, R, m):"], []
            for one in self.kernel.instructions[self._starts[number] : self._starts[number + 1]]:
                statements = self._statements(one, masked, number)
                source += statements
                lines += [one.line] * len(statements)
            source.append(f"return {number + 1}, None, 0")
            exec(compile("\n ".join(source), f"<basic block {number}>", "exec"), self._names)
            self._translated[number, masked] = BasicBlock(self._names.pop("run"), [*lines, 0])
        return self._translated[number, masked]

    def _statements(self, one: Instruction, masked: bool, number: int) -> list[str]:
        """Returns the Python statements of an instruction.

        Raises:
          PTXError: it is not supported.
        """
        try:
            predicate = one.predicate and f"{'~' * one.negated}R[{one.scope.register(one.predicate)}]"
            if one.parts == BARRIER:
                if predicate or one.operands != ("0",):
                    raise PTXError("not supported")
                return ["pass"]
            if one.name in ("barrier.cluster.arrive.aligned", "barrier.cluster.wait.aligned"):
                if predicate or one.operands:
                    raise PTXError("not supported")
                return ["pass"]
            if one.parts[0] in ("bra", "ret"):
                target = self.end if one.name == "ret" else self._block_at[one.scope.label(one.operands[0])]
                taken = f"restrict(m, {predicate})" if predicate else "None"
                return [f"return {target}, {taken}, {number + 1}"]
            setup, results = self._emit(one)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, PTXError) as e:
            text = self.kernel.lines[one.line - 1].strip()
            raise PTXError(f"{self.kernel.name}, PTX line {one.line} is not supported ({e}): {text}") from e

        def with_mask(mask: str) -> list[str]:
            statements, values = list(setup), [value for _, value in results]
            if len(values) > 1:  # all sources are read before a register is written
                statements.append(f"values = {', '.join(values)}")
                values = [f"values[{k}]" for k in range(len(values))]
            for (register, _), value in zip(results, values, strict=True):
                kept = value if mask == "None" else f"np.where({mask}, {value}, R[{register}])"
                statements.append(f"R[{register}] = {kept}")
            return [x.replace("MASK", mask) for x in statements]

        if predicate is None:
            return with_mask("m" if masked else "None")
        whole, part = ([" " + x for x in with_mask(mask)] for mask in ("None", "q"))
        return [f"q = restrict(m, {predicate})", "if q is None:", *whole, "elif q.any():", *part]

    def _emit(self, one: Instruction) -> tuple[list[str], list[tuple[int, str]]]:
        """Returns statements, and the new values of registers, for an instruction without branches."""
        opcode, kind, name = one.parts[0], one.parts[-1], one.name
        if opcode in ("ld", "st"):
            return self._access(one)
        if name == "mapa.shared::cluster.u32":
            address, rank = (self._source(one, x, "u32") for x in one.operands[1:])
            return [], self._result(one, one.operands[0], "u32", f"program.cluster.address_of(MASK, {address}, {rank})")
        if opcode == "cp":
            return self._copy(one), []
        if opcode == "setp":
            return [], self._compare(one)
        if opcode in ("ldmatrix", "stmatrix", "mma", "shfl", "redux", "vote", "atom", "red") or name == "bar.warp.sync":
            return self._together(one)
        if opcode == "mov" and one.operands[0][0] == "{":
            return [], self._unpack(one)
        if opcode == "mov" and one.operands[1][0] == "{":
            parts = split_operands(one.operands[1][1:-1])
            values = [self._source(one, x, f"b{8 * SIZES[kind] // len(parts)}") for x in parts]
            return [], self._result(one, one.operands[0], kind, f"pack([{', '.join(values)}], 'u{SIZES[kind]}')")
        result, source = kind, kind
        if opcode == "cvt":
            result, source = one.parts[-2:]
            if name in PAIR_CONVERSIONS:
                formula = PAIR_CONVERSIONS[name]
            elif len(one.parts) == 3 and is_integer(result) and is_integer(source):
                formula = f"{{0}}.astype('{DTYPES[result].str}')"
            else:
                formula = CONVERSIONS[name]
        elif name in OF_32_BITS:
            formula = OF_32_BITS[name]
        elif one.parts[1:-1] == ("wide",):
            result = f"{kind[0]}{16 * SIZES[kind]}"
            formula = f"{{0}}.astype('{DTYPES[result].str}') * {{1}}" + " + {2}" * (opcode == "mad")
        else:
            formulas = OF_PREDICATES if kind == "pred" else OF_INTEGERS if is_integer(kind) else OF_FLOATS
            if formulas is OF_FLOATS and kind != "f32":
                raise PTXError("floating-point arithmetic is in float32")
            formula = formulas[".".join(one.parts[:-1])]
        types = [SOURCE_TYPES.get((opcode, k), source) for k in range(len(one.operands) - 1)]
        if (opcode, one.parts[1]) == ("mad", "wide"):
            types[2] = result
        if opcode in ("shl", "shr") and one.operands[2].isdigit() and int(one.operands[2]) < 8 * SIZES[kind]:
            formula, types = "{0} << {1}" if opcode == "shl" else "{0} >> {1}", [kind, kind]
        sources = [self._source(one, x, kind) for x, kind in zip(one.operands[1:], types, strict=True)]
        return [], self._result(one, one.operands[0], result, formula.format(*sources))

    def _compare(self, one: Instruction) -> list[tuple[int, str]]:
        kind, relation = one.parts[-1], one.parts[1]
        formula = (OF_INTEGER_PAIRS if is_integer(kind) else OF_FLOAT_PAIRS)[relation]
        value = formula.format(self._source(one, one.operands[1], kind), self._source(one, one.operands[2], kind))
        if one.parts[2:-1] == ("or",):
            value = f"({value}) | {self._source(one, one.operands[3], 'pred')}"
        elif len(one.operands) != 3 or len(one.parts) != 3:
            raise PTXError("unknown comparison")
        return self._result(one, one.operands[0], "pred", value)

    def _unpack(self, one: Instruction) -> list[tuple[int, str]]:
        size, parts = SIZES[one.parts[-1]], split_operands(one.operands[0][1:-1])
        part = size // len(parts)
        source = self._source(one, one.operands[1], f"b{8 * size}")
        results = []
        for k, name in enumerate(parts):
            value = f"({source} >> {self._constant(8 * part * k, f'u{8 * size}')}).astype('u{part}')"
            results += self._result(one, name, f"b{8 * part}", value)
        return results

    def _access(self, one: Instruction) -> tuple[list[str], list[tuple[int, str]]]:
        """Translates `ld` and `st`, which access 1, 2 or 4 elements per thread."""
        opcode, kind, flags = one.parts[0], one.parts[-1], set(one.parts[1:-1])
        if opcode == "ld" and flags == {"param"}:
            name = re.fullmatch(r"\[(\w+)\]", one.operands[1])[1]  # type: ignore[index]
            value = f"program.parameter('{name}', '{DTYPES[kind].str}')"
            return [], self._result(one, one.operands[0], kind, value)
        data, address = one.operands if opcode == "ld" else reversed(one.operands)
        names = split_operands(data[1:-1]) if data[0] == "{" else [data]
        flags -= {f"v{len(names)}"}
        if flags not in ACCESSES or not is_integer(kind) or kind[0] not in "bs":
            raise PTXError("unknown access")
        memory = "cluster" if "cluster" in flags else "shared" if "shared" in flags else "memory"
        place = f"program.{memory}, MASK, {self._address(one, address)}"
        if opcode == "st":
            values = ", ".join(self._source(one, name, kind) for name in names)
            return [f"program.store({place}, [{values}], {one.line})"], []
        results = [x for k, name in enumerate(names) for x in self._result(one, name, kind, f"d[{k}]")]
        return [f"d = program.load({place}, {SIZES[kind]}, {len(names)}, {one.line})"], results

    def _copy(self, one: Instruction) -> list[str]:
        """Translates asynchronous copies from global to shared memory, and their groups."""
        if one.name == "cp.async.commit_group":
            return ["program.copies.commit(MASK)"]
        if one.name == "cp.async.wait_group":
            return [f"program.copies.wait(MASK, {int(one.operands[0])})"]
        if one.name not in ("cp.async.cg.shared.global", "cp.async.ca.shared.global"):
            raise PTXError("unknown copy")
        to, source, size, used = one.operands
        places = f"{self._address(one, to)}, {self._address(one, source)}"
        return [f"program.copies.begin(MASK, {places}, {int(size, 0)}, {self._source(one, used, 'u32')}, {one.line})"]

    def _together(self, one: Instruction) -> tuple[list[str], list[tuple[int, str]]]:
        """Translates the instructions of whole warps, and atomic additions."""
        opcode, name, ops = one.parts[0], one.name, one.operands
        registers = [split_operands(x[1:-1]) if x[0] == "{" else [x] for x in ops]
        if name == "bar.warp.sync" and ops == ("-1",):
            return ["check_whole_warps(MASK)"], []
        if opcode == "shfl" and one.parts[1] == "sync" and one.parts[2] in ("bfly", "idx") and ops[4] == "-1":
            sources = ", ".join(self._source(one, x, "b32") for x in ops[1:4])
            return [], self._result(one, ops[0], "b32", f"shuffle(MASK, '{one.parts[2]}', {sources})")
        if name in ("redux.sync.max.s32", "redux.sync.min.s32"):
            sources = f"{self._source(one, ops[1], 's32')}, {self._source(one, ops[2], 'u32')}"
            return [], self._result(one, ops[0], "s32", f"reduce_warp(MASK, np.{one.parts[2]}imum, {sources})")
        if name == "vote.sync.any.pred" and ops[2] in ("-1", "0xffffffff"):
            value = f"any_of_warp(MASK, {self._source(one, ops[1], 'pred')})"
            return [], self._result(one, ops[0], "pred", value)
        if name in ("atom.global.gpu.release.add.u32", "red.global.gpu.release.add.u32"):
            address, values = ops[-2:]
            add = f"d = program.add(MASK, {self._address(one, address)}, {self._source(one, values, 'u32')})"
            return [add], self._result(one, ops[0], "u32", "d") if opcode == "atom" else []
        stored = re.fullmatch(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", name)
        if stored and len(registers[1]) == int(stored[1]):
            values = ", ".join(self._source(one, r, "b32") for r in registers[1])
            place = (
                f"program.shared, MASK, {self._address(one, ops[0])}, [{values}], {stored[2] is not None}, {one.line}"
            )
            return [f"store_matrices({place})"], []
        results = [x for k, r in enumerate(registers[0]) for x in self._result(one, r, "b32", f"d[{k}]")]
        matrices = re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", name)
        if matrices:
            count, transposed = int(matrices[1]), matrices[2] is not None
            place = f"program.shared, MASK, {self._address(one, ops[1])}, {count}, {transposed}, {one.line}"
            return [f"d = load_matrices({place})"], results
        product = re.fullmatch(r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(f16|bf16|tf32)\.\2\.f32", name)
        if product is None or (product[1], product[2]) == ("16", "tf32"):
            raise PTXError("unknown instruction of a warp")
        lists = ["[" + ", ".join(self._source(one, r, "b32") for r in each) + "]" for each in registers[1:]]
        return [f"d = multiply_matrices(MASK, '{product[2]}', {', '.join(lists)})"], results

    def _source(self, one: Instruction, text: str, kind: str) -> str:
        """Returns an expression for an operand that is read as a type."""
        if text in SPECIAL_REGISTERS:
            return f"program.special['{text}']"
        if text in self.kernel.symbols:
            return self._constant(self.kernel.symbols[text], kind)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return self._constant(int(text[2:], 16), kind)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0|[1-9]\d*)U?", text):
            if kind == "pred":
                return self._constant(int(text, 0) != 0, kind)
            if not is_integer(kind):
                raise PTXError("an integer where a floating-point number is read")
            return self._constant(int(text.rstrip("U"), 0), kind)
        register = one.scope.register(text)
        expression, width = f"R[{register}]", self.kernel.widths[register]
        if width != SIZES[kind]:
            expression += f".astype('u{SIZES[kind]}')"
        same = kind == "pred" or DTYPES[kind] == UNSIGNED[SIZES[kind]]
        return expression if same else f"{expression}.view('{DTYPES[kind].str}')"

    def _result(self, one: Instruction, text: str, kind: str, value: str) -> list[tuple[int, str]]:
        """Returns the register and its new value, given an expression of a type; nothing for the register `_`."""
        if text == "_":
            return []
        register = one.scope.register(text)
        if kind == "pred":
            return [(register, value)]
        if DTYPES[kind] != UNSIGNED[SIZES[kind]]:
            value = f"({value}).view('u{SIZES[kind]}')"
        width = self.kernel.widths[register]
        if width != SIZES[kind]:
            if kind[0] == "s":  # extends the sign
                value = f"({value}).view('i{SIZES[kind]}').astype('i{width}')"
            value = f"({value}).astype('u{width}')"
        return [(register, value)]

    def _address(self, one: Instruction, text: str) -> str:
        """Returns base and offset of `[base + offset]`, as two arguments."""
        base, offset = re.fullmatch(r"\[\s*([\w%$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text).groups("0")  # type: ignore[union-attr]
        if base in self.kernel.symbols:
            return f"{self._constant(self.kernel.symbols[base], 'u32')}, {int(offset, 0)}"
        return f"R[{one.scope.register(base)}], {int(offset, 0)}"

    def _constant(self, value: int, kind: str) -> str:
        """Returns the name of an array `[threads]` with these bits."""
        dtype = DTYPES[kind]
        bits = np.array([value & ((1 << 8 * SIZES[kind]) - 1)], UNSIGNED[SIZES[kind]]).view(dtype)
        key = dtype.str, bits.tobytes()
        if key not in self._constants:
            self._constants[key] = f"constant{len(self._constants)}"
            self._names[self._constants[key]] = np.repeat(bits, self.kernel.threads)
            self._names[self._constants[key]].flags.writeable = False
        return self._constants[key]


def _restrict(mask: Any, predicate: Any) -> Any:
    """Returns the mask of the threads of `mask` whose predicate is true, None if these are all threads."""
    both = predicate if mask is None else predicate & mask
    return None if both.all() else both
